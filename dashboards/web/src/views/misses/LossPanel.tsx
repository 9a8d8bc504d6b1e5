import type { Loss } from "../../api/types";
import { counted, whole } from "../../format";
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
            note={`its next turn found less than it left${kept(loss.multi_turn, loss.capacity_multi_turn)}`}
          />
          <Figure
            label="Of another session"
            value={whole(loss.cross_session)}
            note={`shared, and gone when wanted${kept(loss.cross_session, loss.capacity_cross_session)}`}
          />
        </dl>
        <p className="dim" hidden={loss.multi_turn + loss.cross_session === 0}>
          Such a pool would have kept 95 % of what was lost. What it has beyond today&rsquo;s is
          rounded up to a power of two, so it is an upper bound. What less memory would find is on{" "}
          <a href={linkTo("whatif")}>What if</a>: go by that when buying.
        </p>
      </div>
    </Panel>
  );
}

/** What follows on a number of lost blocks: the pool that would have kept these. */
function kept(lost: number, pool: number | null): string {
  if (lost === 0) return "";
  return pool === null
    ? "; nothing is remembered of what would have kept these"
    : `; a pool of ${counted(pool, "block")} would have kept these`;
}
