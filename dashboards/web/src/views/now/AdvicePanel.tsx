import { useEngineNames } from "../../api/engineNames";
import type { AdviceAge } from "../../api/types";
import { duration } from "../../format";
import { Panel } from "../../parts/Panel";
import { right, Rows } from "../../parts/Rows";

const STALE_S = 2; // an engine does without advice that is older: the contract's max_stale

/** How old the advice of each engine is, and who made it. */
export function AdvicePanel({ advice }: { advice: readonly AdviceAge[] }) {
  const nameOf = useEngineNames();
  return (
    <Panel title="Advice" note={`stale after ${STALE_S} s`}>
      <Rows columns={["engine", "ranked by", right("age")]}>
        {advice.map((each) => (
          <tr key={each.engine}>
            <td className="wrap">{nameOf(each.engine)}</td>
            <td>{each.ranked_by}</td>
            <td className="right" style={{ color: toneOf(each.age_s) }}>
              {duration(each.age_s)}
            </td>
          </tr>
        ))}
      </Rows>
    </Panel>
  );
}

function toneOf(age: number | null): string {
  return age !== null && age > STALE_S ? "var(--bad)" : "inherit";
}
