import { expect, test } from "vitest";

import type { RequestView } from "../../api/types";
import { againOf, computedTokens, longestOf, timingOf } from "./timing";

const request = (ended_at: number | null, waited_s = 0, prompt_s: number | null = 1) =>
  ({
    id: 1,
    at: 100,
    waited_s,
    ended_at,
    prompt_s,
    prompt_tokens: 70,
    block_size: 16,
    blocks: { asked: 4, computed: 3 },
  }) as unknown as RequestView;

test("a request's time is its wait, its prompt and the rest", () => {
  expect(computedTokens(request(104))).toBe(54);
  const parts = { all: 6, held: 0, queue: 2, prompt: 1, rest: 3 };
  expect(timingOf(request(104, 2))).toEqual(parts);
  expect(timingOf(request(104, 2, null))).toMatchObject({ prompt: null, rest: 4 });
  expect(timingOf(request(null))).toBeNull();
});

test("what took longest is named, but not where nobody can tell", () => {
  const held = { ...request(101, 9), wait: { held_s: 6 } } as RequestView;
  expect(timingOf(held)).toMatchObject({ held: 6, queue: 3 });
  expect(longestOf(timingOf(held))).toBe("held");
  expect(longestOf(timingOf(request(101, 9, null)))).toBe("queue");
  expect(longestOf(timingOf(request(109)))).toBe("rest");
  expect(longestOf(timingOf(request(101)))).toBe("prompt");
  expect(longestOf(timingOf(request(109, 0, null)))).toBeNull();
  expect(longestOf(timingOf(request(null)))).toBeNull();
});

test("what was computed again takes its share of the prompt's time", () => {
  const evicted = { ...request(101, 9), again: 2 } as RequestView;
  expect(againOf(evicted).tokens).toBe(32);
  expect(againOf(evicted).seconds).toBeCloseTo(32 / 54);
  expect(againOf({ ...evicted, prompt_s: null }).seconds).toBeNull();
});
