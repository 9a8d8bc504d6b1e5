import type { Misses } from "../../api/types";
import { compact, counted, duration, words } from "../../format";
import { Panel } from "../../parts/Panel";
import { Empty } from "../../parts/states";
import { TimeChart } from "../../parts/TimeChart";
import { change, useRoute } from "../../route";
import { colorOf } from "./reasons";

/** Blocks computed by reason: over time, and in all; a reason chosen filters the requests. */
export function ReasonsPanel({ misses }: { misses: Misses }) {
  const { params } = useRoute();
  const chosen = params.get("reason");
  const seen = Object.keys(misses.reasons).filter((reason) => misses.totals[reason]?.requests);
  return (
    <Panel
      title="Blocks computed, by the reason of the first miss"
      note={`steps of ${duration(misses.step_s)}`}
    >
      {seen.length === 0 ? (
        <Empty title="No miss yet">Either no request came, or each found all that it could.</Empty>
      ) : (
        <>
          <TimeChart
            label="Blocks computed by reason"
            starts={[...misses.starts, (misses.starts.at(-1) ?? 0) + misses.step_s]}
            lines={stacked(misses, seen)}
            height={170}
            format={compact}
          />
          <ul className="reasons">
            {seen.map((reason) => (
              <li key={reason}>
                <button
                  type="button"
                  className="key"
                  aria-pressed={chosen === reason}
                  onClick={() => change({ reason: chosen === reason ? null : reason })}
                >
                  <i style={{ background: `var(--${colorOf(reason)})` }} />
                  {words(reason)}
                  <b>{compact(misses.totals[reason]?.blocks)}</b>
                  <span className="dim">
                    {misses.reasons[reason]}; {counted(misses.totals[reason]?.requests, "request")}
                  </span>
                </button>
              </li>
            ))}
          </ul>
        </>
      )}
    </Panel>
  );
}

/** Areas on top of each other, the tallest first. */
function stacked({ blocks, starts }: Misses, seen: readonly string[]) {
  const height = starts.map(() => 0);
  return seen
    .map((reason) => {
      const own = blocks[reason] ?? [];
      own.forEach((count, step) => (height[step] = (height[step] ?? 0) + count));
      return {
        label: words(reason),
        color: colorOf(reason),
        fill: true,
        steps: true,
        width: 1,
        values: [...height, height.at(-1) ?? null], // the last step, until it ends
      };
    })
    .reverse();
}
