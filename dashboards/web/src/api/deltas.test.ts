import { expect, test } from "vitest";

import { SINCE as EVICTIONS } from "../views/evictions/sinceEviction";
import { SINCE as TURNS } from "../views/sessions/sinceTurn";
import type { Evictions, SessionTimeline } from "./types";

const log = (ids: number[], since: number | null = null, wanted: number | null = null) =>
  ({
    since,
    mark: ids.length === 0 ? null : `log-${ids[0]}`,
    evictions: ids.map((id) => ({ id, wanted_after_s: wanted })),
    meanings: {},
  }) as unknown as Evictions;

test("evictions that came stand first, and those that were wanted again say so", () => {
  expect(EVICTIONS.after(log([7, 6]))).toBe("&after=log-7");
  expect(EVICTIONS.after(log([]))).toBe("");
  const now = EVICTIONS.joined(log([7, 6]), log([9, 8, 6], 7, 3));
  expect(now?.evictions.map(({ id, wanted_after_s }) => [id, wanted_after_s])).toEqual([
    [9, 3],
    [8, 3],
    [7, null],
    [6, 3],
  ]);
});

test("a log that begins anew is taken as it is", () => {
  const anew = log([1, 0]);
  expect(EVICTIONS.joined(log([7, 6]), anew)).toBe(anew);
});

/** Turns of one second each, ten seconds apart; the last one may run. */
function timeline(requests: number[], since: number | null = null, runs = false) {
  const turns = requests.map((request) => ({
    request,
    at: 10 * request,
    ended_at: 10 * request + 1,
  }));
  const over = runs ? turns.slice(0, -1) : turns;
  if (runs) turns.at(-1)!.ended_at = null as unknown as number;
  const starts = turns.map(({ at }) => at);
  const moments = turns.map(({ at, request }) => ({ at, request, what: "turn" })).reverse();
  const residency = { starts, pool: requests, warm: requests, cold: requests };
  const mark = over.length === 0 ? null : `log-${over.at(-1)!.request}`;
  return { since, mark, turns, moments, residency } as unknown as SessionTimeline;
}

test("a session is asked for from its last turn on that had ended", () => {
  expect(TURNS.after(timeline([1, 2, 3]))).toBe("&after=log-3");
  expect(TURNS.after(timeline([1, 2, 3], null, true))).toBe("&after=log-2");
  expect(TURNS.after(timeline([1], null, true))).toBe("");
});

test("what is told anew replaces what was known of it", () => {
  const now = TURNS.joined(timeline([1, 2, 3], null, true), timeline([2, 3, 4], 2));
  expect(now?.turns.map(({ request }) => request)).toEqual([1, 2, 3, 4]);
  expect(now?.turns[2]?.ended_at).toBe(31);
  expect(now?.residency).toMatchObject({ starts: [10, 20, 30, 40], pool: [1, 2, 3, 4] });
  expect(now?.moments.map(({ at }) => at)).toEqual([40, 30, 20, 10]);
});

test("where the log forgot the turn, or another sidecar answers, all is taken anew", () => {
  const whole = timeline([8, 9]);
  expect(TURNS.joined(timeline([1, 2]), whole)).toBe(whole);
  expect(TURNS.joined(timeline([1, 2]), timeline([5, 6], 5))).toBeNull();
});

test("a pause of an earlier turn is kept, however late it ended", () => {
  const known = timeline([1, 2]);
  const late = { at: 25, request: 1, what: "pause" };
  const before = { ...known, moments: [late, ...known.moments] } as unknown as SessionTimeline;
  const now = TURNS.joined(before, timeline([2, 3], 2));
  expect(now?.moments.filter(({ what }) => what === "pause")).toEqual([late]);
});

test("an open session does not grow without end", () => {
  let now = timeline([0]);
  for (let turn = 1; turn < 700; turn++)
    now = TURNS.joined(now, timeline([turn - 1, turn], turn - 1))!;
  expect([now.turns.length, now.moments.length, now.residency.pool.length]).toEqual([
    500, 500, 500,
  ]);
  expect(now.residency.starts[0]).toBe(now.turns[0]!.at);
});
