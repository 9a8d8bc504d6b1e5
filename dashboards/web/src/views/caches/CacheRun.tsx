import type { CacheSteps } from "../../api/types";
import { counted, duration, whole } from "../../format";
import { Legend } from "../../parts/Legend";
import { Panel } from "../../parts/Panel";
import { type Line, TimeChart } from "../../parts/TimeChart";

const SILENT_S = 5; // after which a run is taken to be over

/** One run: what its layers hold, what they may keep, and how sure the model is. */
export function CacheRun({ of, now }: { of: CacheSteps; now: number }) {
  const held: Line[] = [
    { label: "tokens held", color: "pool", fill: true, values: of.held },
    { label: "budget", color: "shadow", dash: true, steps: true, values: of.budget },
  ];
  const sure: Line[] = [{ label: "confidence", color: "context", values: of.confidence }];
  return (
    <Panel title={of.run} note={noteOf(of, now)}>
      <TimeChart
        label={`Tokens that a layer of ${of.run} holds`}
        starts={of.at}
        lines={held}
        height={240}
        format={whole}
      />
      <TimeChart
        label={`How sure ${of.run} is`}
        starts={of.at}
        lines={sure}
        height={96}
        max={1}
        format={(value) => value.toFixed(1)}
      />
      <Legend entries={[...held, ...sure]} />
    </Panel>
  );
}

function noteOf(of: CacheSteps, now: number): string {
  const budgets = `${whole(of.low)} tokens a layer while it is sure, ${whole(of.high)} while not`;
  const last = of.at.at(-1);
  if (last === undefined) return budgets;
  const ago = now - last;
  const when = ago < SILENT_S ? "now" : `last ${duration(ago)} ago`;
  return `${budgets}; ${counted(of.at.length, "step")} shown, ${when}`;
}
