import { MOST_TURNS } from "../../api/limits";
import type { Delta } from "../../api/resource";
import type { Moment, SessionTimeline } from "../../api/types";

/** Asks for what happened since the last turn that may not change, and puts it to what was known. */
export const SINCE: Delta<SessionTimeline> = {
  after: ({ mark }) => (mark === null ? "" : `&after=${mark}`),
  joined: (known, next) => {
    const { since } = next;
    if (since === null) return next;
    const place = known.turns.findIndex(({ request }) => request === since);
    const first = known.turns[place];
    if (first === undefined) return null;
    const turns = [...known.turns.slice(0, place), ...next.turns].slice(-MOST_TURNS);
    const begin = turns[0]!.at;
    const isBefore = ({ request, at }: Moment) =>
      at >= begin && (request === null ? at < first.at : request < since);
    const { starts } = known.residency;
    const [from, to] = [
      starts.findIndex((at) => at >= begin),
      starts.findIndex((at) => at >= first.at),
    ];
    const both = (tier: "starts" | "pool" | "warm" | "cold") => [
      ...known.residency[tier].slice(Math.max(0, from), to < 0 ? starts.length : to),
      ...next.residency[tier],
    ];
    return {
      ...next,
      turns,
      moments: [...next.moments, ...known.moments.filter(isBefore)],
      residency: {
        starts: both("starts"),
        pool: both("pool"),
        warm: both("warm"),
        cold: both("cold"),
      },
    };
  },
};
