import type { GraphStage } from "./GraphStage";
import { timeAt } from "./layouts/timeline";

const MARKS = [
  [0, "now"],
  [10, "10 s ago"],
  [60, "1 min"],
  [600, "10 min"],
  [3600, "1 h"],
  [36_000, "10 h"],
] as const;

/** What the places of the timeline mean, up to the first mark beyond what was used longest ago. */
export function TimeScale({ stage, oldest }: { stage: GraphStage | null; oldest: number }) {
  if (stage === null) return null;
  return (
    <div className="scale" aria-hidden="true">
      {MARKS.filter((_, at) => at === 0 || MARKS[at - 1]![0] < oldest).map(([seconds, label]) => (
        <span
          key={label}
          style={{ transform: `translateX(${stage.camera.toPixels(timeAt(seconds), 0)[0]}px)` }}
        >
          {label}
        </span>
      ))}
    </div>
  );
}
