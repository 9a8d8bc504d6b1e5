import type { Sampled } from "../../api/types";
import { UNKNOWN, words } from "../../format";
import { Panel } from "../../parts/Panel";
import { Rows, Scroll, right } from "../../parts/Rows";
import { SessionLink } from "../../parts/links";

/** How sure the model is of what it writes, by session, the least sure first. */
export function SureOf({ data }: { data: Sampled }) {
  const mean = data.confidence;
  return (
    <Panel
      title="How sure it is"
      note={`by session; mean ${mean === null ? UNKNOWN : mean.toFixed(2)}`}
    >
      <Scroll label="How sure it is">
        <Rows columns={["session", "how sure", right("to the mean")]}>
          {data.sessions.map((each) => (
            <tr key={`${each.tenant} ${each.session}`}>
              <td>
                <SessionLink of={each.session} tenant={each.tenant} />
                <div className="dim wrap">
                  {each.tenant !== null && `${each.tenant}, `}
                  {words(each.state)}
                </div>
              </td>
              <td className="looks">
                <span className="track">
                  <i style={{ width: `${100 * each.confidence}%` }} />
                </span>
                {each.confidence.toFixed(2)}
              </td>
              <td className="right">{against(each.confidence, mean)}</td>
            </tr>
          ))}
        </Rows>
      </Scroll>
      <p className="dim wrap after">
        From 0 to 1, and no probability of being right. Of a session below the mean more is kept, of
        one above it less: <code>confidence</code> in Weights says how much.
      </p>
    </Panel>
  );
}

function against(confidence: number, mean: number | null): string {
  if (mean === null) return UNKNOWN;
  const difference = confidence - mean;
  return `${difference < 0 ? "−" : "+"}${Math.abs(difference).toFixed(2)}`;
}
