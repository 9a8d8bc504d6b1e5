import { useEngineNames } from "../../api/engineNames";
import type { Now } from "../../api/types";
import { duration } from "../../format";
import { Panel } from "../../parts/Panel";
import { right, Rows } from "../../parts/Rows";

/** How old the advice of each engine is, and who made it. */
export function AdvicePanel({ now }: { now: Now }) {
  const nameOf = useEngineNames();
  return (
    <Panel title="Advice" note={`stale after ${duration(now.stale_s)}`}>
      <Rows columns={["engine", "ranked by", right("age")]}>
        {now.advice.map((each) => (
          <tr key={each.engine}>
            <td className="wrap">{nameOf(each.engine)}</td>
            <td>{each.ranked_by}</td>
            <td className="right" style={{ color: toneOf(each.age_s, now.stale_s) }}>
              {duration(each.age_s)}
            </td>
          </tr>
        ))}
      </Rows>
    </Panel>
  );
}

function toneOf(age: number | null, stale: number): string {
  return age !== null && age > stale ? "var(--bad)" : "inherit";
}
