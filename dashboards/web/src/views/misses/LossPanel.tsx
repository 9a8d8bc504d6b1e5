import type { Loss } from "../../api/types";
import { counted, whole } from "../../format";
import { Facts } from "../../parts/Facts";
import { Figure } from "../../parts/Figure";
import { Panel } from "../../parts/Panel";
import { linkTo } from "../../route";

/** What was computed again though it had been there, and how large a pool would have kept it. */
export function LossPanel({ loss }: { loss: Loss }) {
  return (
    <Panel title="Computed again" note="blocks, since the start">
      <div className="stack">
        <dl className="figures">
          <Figure
            label="Of their own session"
            value={whole(loss.multi_turn)}
            note="its next turn found less than it left"
          />
          <Figure
            label="Of another session"
            value={whole(loss.cross_session)}
            note="shared, and gone when wanted"
          />
        </dl>
        <Facts
          of={{
            "to keep its own": enough(loss.capacity_multi_turn),
            "to keep another's": enough(loss.capacity_cross_session),
          }}
        />
        <p className="dim">
          So large a pool would have kept 95 % of what was lost, however long ago it had been used.
          It is an upper bound; what less memory would find is on{" "}
          <a href={linkTo("whatif")}>What if</a>: go by that when buying.
        </p>
      </div>
    </Panel>
  );
}

function enough(blocks: number | null): string {
  return blocks === null
    ? "nothing was lost, or nothing is remembered of it"
    : `a pool of ${counted(blocks, "block")}`;
}
