import type { Sampled } from "../../api/types";
import { percent } from "../../format";
import { LayerKey } from "../../parts/LayerKey";
import { Panel } from "../../parts/Panel";
import { Rows, Scroll, right } from "../../parts/Rows";
import { BlockLink, SessionLink } from "../../parts/links";

/** The most attended blocks. */
export function LookedAt({ blocks }: { blocks: Sampled["blocks"] }) {
  return (
    <Panel title="Blocks that it looks at most" note="mean share of a sample">
      {blocks.length === 0 ? (
        <p className="dim wrap">
          Samples told how sure the model is, and not yet where it looks: a step on a busy engine
          has no time for that, and later ones will.
        </p>
      ) : (
        <Scroll label="Blocks that it looks at most">
          <Rows
            columns={[
              "block",
              "of",
              right("attention"),
              { name: "importance", className: "right wide" },
              { name: "now", className: "wide" },
            ]}
          >
            {blocks.map((each) => (
              <tr key={each.key}>
                <td>
                  <BlockLink of={each.key} />
                  <LayerKey of={each.layer} className="dim" />
                </td>
                <td className="wrap">
                  {each.session !== null && <SessionLink of={each.session} />}
                  {each.identity !== null && <span className="dim wrap"> {each.identity}</span>}
                </td>
                <td className="right">{percent(each.attention, 1, 1)}</td>
                <td className="right wide">{each.importance.toFixed(2)}</td>
                <td className="wide">
                  {each.in_pool ? "in the pool" : <span className="regret">evicted</span>}
                </td>
              </tr>
            ))}
          </Rows>
        </Scroll>
      )}
    </Panel>
  );
}
