import type { SessionTimeline } from "../../api/types";
import { duration } from "../../format";

/** What a session was like at a moment, as far as its logs tell. */
export interface ThatTime {
  readonly at: number;
  readonly doing: string;
  readonly pool: number;
  readonly warm: number;
  readonly cold: number;
}

/** The first and the last moment that are known of a session. */
export function reachOf({ turns, residency }: SessionTimeline): [number, number] | null {
  const first = turns[0]?.at;
  const last = residency.starts.at(-1);
  return first === undefined || last === undefined || last <= first ? null : [first, last];
}

export function thatTime(timeline: SessionTimeline, at: number): ThatTime {
  const { residency } = timeline;
  const step = residency.starts.findLastIndex((start) => start <= at);
  const of = (tier: "pool" | "warm" | "cold") => residency[tier][step] ?? 0;
  return { at, doing: doingAt(timeline, at), pool: of("pool"), warm: of("warm"), cold: of("cold") };
}

function doingAt({ turns }: SessionTimeline, at: number): string {
  const turn = turns.findLastIndex((each) => each.at <= at);
  const its = turns[turn];
  if (its === undefined) return "not here yet";
  if (its.ended_at === null || its.ended_at > at) return `turn ${turn + 1} runs`;
  const ago = duration(at - its.ended_at);
  const expected = its.expected_pause_s;
  const due = expected === null ? "" : `, expected ${duration(expected)}`;
  return `paused for ${ago} after turn ${turn + 1}${due}`;
}
