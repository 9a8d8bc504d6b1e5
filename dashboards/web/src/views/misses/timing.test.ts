import { expect, test } from "vitest";

import type { RequestView } from "../../api/types";
import {
  againOf,
  beyondTheCache,
  computedTokens,
  isWorthTelling,
  longestOf,
  mostSaved,
  timingOf,
} from "./timing";

const request = (id: number, ended_at: number | null, waited_s = 0) =>
  ({
    id,
    at: 100,
    waited_s,
    ended_at,
    prompt_tokens: 70,
    block_size: 16,
    blocks: { asked: 4, computed: 3 },
  }) as unknown as RequestView;

test("a request's time is its wait, its prompt and the rest", () => {
  expect(computedTokens(request(1, 104))).toBe(54);
  expect(timingOf(request(1, 104, 2), 54)).toEqual({
    all: 6,
    held: 0,
    queue: 2,
    prompt: 1,
    rest: 3,
  });
  expect(timingOf(request(1, 104, 2), null)).toMatchObject({ prompt: null, rest: 4 });
  expect(timingOf(request(1, 100.5), 54)).toMatchObject({ all: 0.5, prompt: 0.5, rest: 0 });
  expect(timingOf(request(1, null), 54)).toBeNull();
});

test("a cache ends neither a wait nor an answer", () => {
  const most = (ended_at: number | null, waited_s: number, rate: number | null) =>
    beyondTheCache(timingOf(request(1, ended_at, waited_s), rate));
  expect(most(101, 3, 54)).toBe("queue");
  expect(most(109, 1, 54)).toBe("rest");
  expect(most(101, 0.5, 54)).toBeNull();
  expect(most(109, 1, null)).toBeNull();
  expect(most(101, 3, null)).toBe("queue"); // whatever prefills take
  expect(most(null, 1, 54)).toBeNull();
});

test("what took longest is named, but not where nobody can tell", () => {
  const held = { ...request(1, 101, 9), wait: { held_s: 6 } } as RequestView;
  expect(timingOf(held, 54)).toMatchObject({ held: 6, queue: 3 });
  expect(longestOf(timingOf(held, 54))).toBe("held");
  expect(longestOf(timingOf(request(1, 101, 9), null))).toBe("queue");
  expect(longestOf(timingOf(request(1, 109), 54))).toBe("rest");
  expect(longestOf(timingOf(request(1, 101), 54))).toBe("prompt");
  expect(longestOf(timingOf(request(1, 109), null))).toBeNull();
  expect(longestOf(timingOf(request(1, null), 54))).toBeNull();
});

test("what a cache could have saved is told only where it is worth a sentence", () => {
  const evicted = { ...request(1, 101, 9), again: 2, miss: { reason: "evicted" } } as RequestView;
  const saves = (of: RequestView, rate: number | null = 54) => mostSaved(of, rate);
  const isTold = (of: RequestView) => isWorthTelling(saves(of), timingOf(of, 54));
  expect(againOf(evicted, 54).tokens).toBe(32);
  expect(saves(evicted)).toBeCloseTo(32 / 54);
  expect(isTold(evicted)).toBe(true);
  expect(isTold({ ...evicted, waited_s: 99 })).toBe(false);
  expect(saves({ ...evicted, again: 0 })).toBe(1); // elsewhere: all of its prompt
  expect(saves({ ...evicted, again: 0, miss: { reason: "never_seen" } } as RequestView)).toBe(0);
  expect(saves(evicted, null)).toBeNull();
  expect(isTold({ ...evicted, ended_at: null })).toBe(true);
});
