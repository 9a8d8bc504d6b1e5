import type { Shadows } from "../../api/types";
import { duration, percent } from "../../format";
import { Legend } from "../../parts/Legend";
import { type Line, TimeChart } from "../../parts/TimeChart";
import { CEILING, colorsOf, OURS } from "./looks";

/** Hit rates by step, of the shadows as large as the live pool. */
export function ShadowHistory({ data }: { data: Shadows }) {
  const colors = colorsOf(data.shadows);
  const lines: Line[] = data.shadows
    .filter(({ capacity }) => capacity === 1)
    .map(({ name, policy, history }) => ({
      label: name,
      color: (name === CEILING ? "warn" : colors.get(policy)) ?? "dim",
      values: history,
      fill: name === OURS,
      width: name === OURS ? 2.5 : 1.5,
      dash: name !== OURS,
    }));
  lines.sort((a, b) => Number(b.label === OURS) - Number(a.label === OURS));
  return (
    <>
      <TimeChart
        label="Share of blocks found"
        starts={data.starts}
        lines={lines}
        max={1}
        height={260}
        format={(value) => percent(value)}
      />
      <Legend entries={lines} />
      <p className="dim">
        The last {duration(data.step_s * data.starts.length)}, in steps of {duration(data.step_s)};
        a step in which nothing was asked has no point.
      </p>
    </>
  );
}
