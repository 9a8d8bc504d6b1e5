import { expect, test } from "vitest";

import { joined } from "./joined";
import type { TokenHistory } from "./types";

function history(starts: number[], asked: number[]): TokenHistory {
  const same = { requests: asked, pool: asked, loaded: asked, prefetched: asked, computed: asked };
  return { step_s: 10, starts, asked, lru: asked.map(() => null), ...same };
}

test("the first history is taken as it is", () => {
  const whole = history([0, 10], [1, 2]);
  expect(joined(undefined, whole, 2)).toBe(whole);
});

test("last steps are told anew, and new ones follow", () => {
  const now = joined(history([0, 10, 20], [1, 2, 3]), history([10.01, 20.01, 30.01], [2, 5, 6]), 4);
  expect(now.starts).toEqual([0, 10.01, 20.01, 30.01]);
  expect(now.asked).toEqual([1, 2, 5, 6]);
  expect(now.lru).toEqual([null, null, null, null]);
});

test("the oldest steps go when the history is full", () => {
  const now = joined(history([0, 10, 20], [1, 2, 3]), history([20, 30], [3, 4]), 3);
  expect(now.starts).toEqual([10, 20, 30]);
});

test("a whole history replaces what was known", () => {
  const whole = history([0, 20], [3, 4]);
  expect(joined(history([0, 10, 20], [1, 2, 3]), whole, 2)).toBe(whole);
});
