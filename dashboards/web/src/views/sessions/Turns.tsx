import type { Turn } from "../../api/types";
import { clock, counted, duration, percent } from "../../format";
import { Legend } from "../../parts/Legend";
import { linkTo } from "../../route";

const [WIDTH, HEIGHT] = [1000, 64];

/**
 * Turns as bars over time, as tall as what they found; between them the pauses, expected and real;
 * a line at a moment that is looked at.
 */
export function Turns({ turns, at }: { turns: readonly Turn[]; at: number | null }) {
  if (turns.length === 0) return <p className="dim">The log remembers no turn of it.</p>;
  const begin = Math.min(...turns.map((turn) => turn.at - turn.waited_s));
  const end = Math.max(
    ...turns.map((turn) => (turn.ended_at ?? turn.at) + (turn.pause_s ?? 0)),
    begin + 1,
  );
  const x = (at: number) => (WIDTH * (at - begin)) / (end - begin);
  return (
    <div>
      <h3>
        Turns, from {clock(begin)} to {clock(end)}
      </h3>
      <svg className="turns" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none">
        <line x1="0" x2={WIDTH} y1={HEIGHT - 0.5} y2={HEIGHT - 0.5} stroke="var(--line)" />
        {turns.map((turn) => (
          <One key={turn.request} turn={turn} x={x} />
        ))}
        {at !== null && (
          <line x1={x(at)} x2={x(at)} y1="0" y2={HEIGHT} stroke="var(--text)" strokeWidth="2" />
        )}
      </svg>
      <Legend
        entries={[
          { label: "found", color: "pool" },
          { label: "computed", color: "computed" },
          ...(turns.some((turn) => turn.waited_s > 0)
            ? [{ label: "in the queue before", color: "waits" }]
            : []),
          { label: "pause, as it was expected", color: "prefetched" },
        ]}
      />
    </div>
  );
}

function One({ turn, x }: { turn: Turn; x: (at: number) => number }) {
  const ended = turn.ended_at ?? turn.at;
  const width = Math.max(3, x(ended) - x(turn.at));
  const all = Math.max(1, turn.found_blocks + turn.computed_blocks);
  const found = (HEIGHT - 8) * (turn.found_blocks / all);
  const expected = turn.expected_pause_s;
  const said = saidOf(turn, all);
  return (
    <>
      {expected !== null && (
        <rect
          x={x(ended)}
          width={Math.max(1, x(ended + expected) - x(ended))}
          y={HEIGHT - 7}
          height="5"
          fill="var(--prefetched)"
          opacity="0.6"
        />
      )}
      <a href={linkTo("misses", { request: turn.request })} aria-label={said}>
        <title>{said}</title>
        {turn.waited_s > 0 && (
          <rect
            x={x(turn.at - turn.waited_s)}
            width={x(turn.at) - x(turn.at - turn.waited_s)}
            y={HEIGHT / 2}
            height={HEIGHT / 2 - 8}
            fill="var(--waits)"
            opacity="0.6"
          />
        )}
        <rect x={x(turn.at)} width={width} y="0" height={HEIGHT - 8} fill="var(--computed)" />
        <rect
          x={x(turn.at)}
          width={width}
          y={HEIGHT - 8 - found}
          height={found}
          fill="var(--pool)"
        />
      </a>
    </>
  );
}

function saidOf(turn: Turn, all: number): string {
  const pause = turn.pause_s === null ? "" : `, then a pause of ${duration(turn.pause_s)}`;
  const expected =
    turn.expected_pause_s === null ? "" : `, expected ${duration(turn.expected_pause_s)}`;
  const waited = turn.waited_s === 0 ? "" : `, after ${duration(turn.waited_s)} in the queue`;
  return `${clock(turn.at)}${waited}: ${counted(turn.prompt_tokens, "token")}, ${percent(turn.found_blocks, all)} found${pause}${expected}`;
}
