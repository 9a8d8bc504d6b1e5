import { MOST_EVICTIONS } from "../../api/limits";
import type { Delta } from "../../api/resource";
import type { Evictions } from "../../api/types";

/** Asks for evictions that came, and for those that were wanted again, since the last answer. */
export const SINCE: Delta<Evictions> = {
  after: ({ mark }) => (mark === null ? "" : `&after=${mark}`),
  joined: (known, next) => {
    if (next.since === null) return next;
    const all = new Map(known.evictions.map((each) => [each.id, each]));
    for (const each of next.evictions) all.set(each.id, each);
    const evictions = [...all.values()]
      .sort((one, other) => other.id - one.id)
      .slice(0, MOST_EVICTIONS);
    return { ...next, evictions, meanings: { ...known.meanings, ...next.meanings } };
  },
};
