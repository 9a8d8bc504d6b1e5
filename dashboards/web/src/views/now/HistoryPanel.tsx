import type { TokenHistory } from "../../api/types";
import { duration, percent } from "../../format";
import { Legend } from "../../parts/Legend";
import { Panel } from "../../parts/Panel";
import { Empty } from "../../parts/states";
import { type Line, TimeChart } from "../../parts/TimeChart";

/** What share of prompts came from the cache over time, beside what stock would have found. */
export function HistoryPanel({ history }: { history: TokenHistory }) {
  const lines = linesOf(history);
  return (
    <Panel title="Prompt tokens from the cache" note={`steps of ${duration(history.step_s)}`}>
      {history.asked.some((asked) => asked > 0) ? (
        <>
          <TimeChart
            label="Share of prompt tokens from the cache"
            starts={history.starts}
            lines={lines}
            height={288}
            max={1}
            format={(value) => percent(value)}
          />
          <Legend entries={lines} />
        </>
      ) : (
        <Empty title="No request yet">
          As soon as an engine serves one, this shows how much of its prompt it did not have to
          compute.
        </Empty>
      )}
    </Panel>
  );
}

/** Areas from the tallest to the lowest, so that each shows what it adds; stock above them. */
function linesOf(history: TokenHistory): Line[] {
  const share = (values: readonly number[]) =>
    values.map((value, step) => ratio(value, history.asked[step]));
  const sum = (...columns: readonly (readonly number[])[]) =>
    history.asked.map((_, step) => columns.reduce((all, column) => all + (column[step] ?? 0), 0));
  const { pool, prefetched, loaded, lru } = history;
  const areas: Line[] = [
    { label: "loaded", color: "loaded", fill: true, values: share(sum(pool, prefetched, loaded)) },
    { label: "prefetched", color: "prefetched", fill: true, values: share(sum(pool, prefetched)) },
    { label: "pool", color: "pool", fill: true, values: share(pool) },
  ];
  const has = { loaded: loaded.some(Boolean), prefetched: prefetched.some(Boolean), pool: true };
  const shown = areas.filter(({ label }) => has[label as keyof typeof has]);
  const stock = lru.map((value, step) =>
    value === null ? null : ratio(value, history.asked[step]),
  );
  if (lru.every((value) => value === null)) return shown;
  return [...shown, { label: "stock LRU", color: "shadow", dash: true, values: stock }];
}

function ratio(part: number, all: number | undefined): number | null {
  return all ? part / all : null;
}
