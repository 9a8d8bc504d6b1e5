import type { Sampled } from "../../api/types";
import { counted, percent, whole } from "../../format";
import { LayerKey } from "../../parts/LayerKey";
import { Panel } from "../../parts/Panel";
import { Rows, right } from "../../parts/Rows";
import { linkTo } from "../../route";

/** Which source layers the model looks at, against how large they are. */
export function LayerLooks({ data }: { data: Sampled }) {
  const blocks = data.layers.reduce((sum, each) => sum + each.blocks, 0);
  return (
    <Panel title="Where it looks, by source layer" note={`${counted(blocks, "block")} sampled`}>
      <Rows
        columns={[
          "layer",
          "share of attention",
          { name: "of blocks", className: "right wide" },
          right("times its size"),
        ]}
      >
        {data.layers.map((each) => (
          <tr key={each.layer}>
            <td>
              <LayerKey of={each.layer} />
            </td>
            <td className="looks">
              <span className="track">
                <i
                  style={{
                    width: `${100 * each.attention}%`,
                    background: `var(--${each.layer})`,
                  }}
                />
              </span>
              {percent(each.attention)}
            </td>
            <td className="right wide">
              {percent(each.blocks, blocks)} <span className="dim">{whole(each.blocks)}</span>
            </td>
            <td className="right">{timesItsSize(each.attention, each.blocks / blocks)}</td>
          </tr>
        ))}
      </Rows>
      <p className="dim wrap after">
        The last column compares the two shares: above 1 ×, a layer gets more than its size alone
        would give it. Blocks that are attended to in the same steps, or that say much the same, are
        linked: {counted(data.edges.co_attend, "co-attend edge")} and{" "}
        {counted(data.edges.semantic, "semantic edge")}, shown in the{" "}
        <a href={linkTo("graph")}>graph</a>.
      </p>
    </Panel>
  );
}

function timesItsSize(attention: number, size: number): string {
  return `${(attention / size).toFixed(1)} ×`;
}
