import type { Evictions } from "../../api/types";
import { duration, whole, words } from "../../format";
import { Panel } from "../../parts/Panel";
import { linkTo } from "../../route";

/** What decided evictions since the start, and how many of them were regretted. */
export function RuleTotals({ log }: { log: Evictions }) {
  const rules = Object.entries(log.rules).filter(([, total]) => total.evicted > 0);
  const most = Math.max(1, ...rules.map(([, total]) => total.evicted));
  if (rules.length === 0) return null;
  return (
    <Panel
      title="By rule, since the start"
      note={`regretted: computed again within ${duration(log.window_s)}`}
    >
      <dl className="rules">
        {rules.map(([rule, { evicted, wanted }]) => (
          <div key={rule}>
            <dt>{words(rule)}</dt>
            <dd className="track">
              <i style={{ width: `${(100 * evicted) / most}%` }}>
                <b style={{ width: `${(100 * wanted) / evicted}%` }} />
              </i>
            </dd>
            <dd>
              {whole(evicted)} <span className="dim">{whole(wanted)} regretted</span>
            </dd>
          </div>
        ))}
      </dl>
      <p className="dim wrap regrets">
        Do not compare LRU and the policy by these shares: they ranked at different times, and under
        pressure every order regrets much. <a href={linkTo("whatif")}>What if</a> compares them on
        the same requests.
      </p>
      {log.protected_lost !== null && <p className="lost wrap">{log.protected_lost}</p>}
    </Panel>
  );
}
