import type { Engines } from "../../api/types";
import { whole, words } from "../../format";
import { Panel } from "../../parts/Panel";

/** What the sidecar counted since its start, by its parts. */
export function Counters({ counters }: { counters: Engines["counters"] }) {
  const groups = Object.entries(counters).filter(([, counts]) =>
    Object.values(counts).some(Boolean),
  );
  return (
    <>
      {groups.map(([group, counts]) => (
        <Panel key={group} title={`Counters: ${words(group)}`}>
          <table className="rows">
            <tbody>
              {Object.entries(counts)
                .filter(([, count]) => count > 0)
                .map(([what, count]) => (
                  <tr key={what}>
                    <td>{words(what)}</td>
                    <td className="right">{whole(count)}</td>
                  </tr>
                ))}
            </tbody>
          </table>
        </Panel>
      ))}
    </>
  );
}
