import { expect, test } from "vitest";

import type { SessionTimeline, Turn } from "../../api/types";
import { reachOf, thatTime } from "./thatTime";

const turn = (
  at: number,
  ended_at: number | null,
  expected_pause_s: number | null = null,
): Turn => ({
  request: at,
  at,
  waited_s: 0,
  ended_at,
  prompt_tokens: 64,
  found_blocks: 0,
  computed_blocks: 4,
  pause_s: null,
  expected_pause_s,
});

const timeline = {
  turns: [turn(100, 110, 60), turn(150, null)],
  residency: {
    starts: [100, 130, 150, 160],
    pool: [4, 2, 5, 5],
    warm: [0, 2, 0, 0],
    cold: [0, 0, 0, 1],
  },
} as unknown as SessionTimeline;

test("what a session held and did at a moment", () => {
  expect(reachOf(timeline)).toEqual([100, 160]);
  expect(thatTime(timeline, 105)).toMatchObject({ doing: "turn 1 runs", pool: 4, warm: 0 });
  expect(thatTime(timeline, 140)).toMatchObject({ pool: 2, warm: 2, cold: 0 });
  expect(thatTime(timeline, 140).doing).toContain("after turn 1");
  expect(thatTime(timeline, 155).doing).toBe("turn 2 runs");
});

test("of a session without turns there is no time to travel to", () => {
  expect(reachOf({ ...timeline, turns: [] })).toBeNull();
});
