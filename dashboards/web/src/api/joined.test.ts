import { expect, test } from "vitest";

import { joined, joinedRequests } from "./joined";
import type { News, RequestView, TokenHistory } from "./types";

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

const request = (id: number, ended_at: number | null = 1) => ({ id, ended_at }) as RequestView;
const news = (requests: RequestView[], is_gap = false) => ({ requests, is_gap }) as News;

test("requests that ended stand where they began, and new ones first", () => {
  const { requests: now } = joinedRequests(
    [request(2), request(1, null)],
    news([request(1, 7), request(3)]),
  );
  expect(now.map(({ id }) => id)).toEqual([3, 2, 1]);
  expect(now[2]?.ended_at).toBe(7);
});

test("behind a gap, what was known is forgotten, and a list has an end", () => {
  const anew = joinedRequests([request(900)], news([request(3)], true));
  expect(anew.requests.map(({ id }) => id)).toEqual([3]);
  expect(anew.next).toBeNull();
  const many = Array.from({ length: 150 }, (_, id) => request(id));
  const more = Array.from({ length: 150 }, (_, id) => request(150 + id));
  const { requests: now, next } = joinedRequests(many, news(more));
  expect([now.length, now[0]?.id, now.at(-1)?.id, next]).toEqual([200, 299, 100, 100]);
});
