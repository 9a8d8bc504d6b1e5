import type { Delta } from "../../api/resource";
import type { SessionTimeline } from "../../api/types";

const MOST = 500; // turns that are kept

/** Asks for what happened since the last turn that had ended, and puts it to what was known. */
export const SINCE: Delta<SessionTimeline> = {
  after: ({ turns }) => {
    const running = turns.findIndex(({ ended_at }) => ended_at === null);
    const last = turns[(running < 0 ? turns.length : running) - 1];
    return last === undefined ? "" : `&after=${last.request}`;
  },
  joined: (known, next) => {
    if (next.since === null) return next;
    const place = known.turns.findIndex(({ request }) => request === next.since);
    const first = known.turns[place];
    if (first === undefined) return null;
    const kept = known.residency.starts.filter((start) => start < first.at).length;
    const both = (tier: "starts" | "pool" | "warm" | "cold") => [
      ...known.residency[tier].slice(0, kept),
      ...next.residency[tier],
    ];
    return {
      ...next,
      turns: [...known.turns.slice(0, place), ...next.turns].slice(-MOST),
      moments: [...next.moments, ...known.moments.filter(({ at }) => at < first.at)],
      residency: {
        starts: both("starts"),
        pool: both("pool"),
        warm: both("warm"),
        cold: both("cold"),
      },
    };
  },
};
