import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { Pace } from "./Pace";

let waiting: (() => void)[] = [];

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("requestAnimationFrame", (call: () => void) => waiting.push(call));
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
  waiting = [];
});

/** One step of a movement: its frame takes so long, and the hand rests before the next. */
function step(pace: Pace, frame_ms: number, rest_ms: number): number {
  pace.moved();
  const share = pace.next();
  vi.advanceTimersByTime(frame_ms);
  for (const call of waiting.splice(0)) call();
  vi.advanceTimersByTime(rest_ms);
  return share;
}

test("frames that take long show fewer edges, down to a sixteenth", () => {
  const pace = new Pace(() => {});
  const shares = Array.from({ length: 6 }, () => step(pace, 90, 0));
  expect(shares).toEqual([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16]);
});

test("a slow hand costs no edges", () => {
  const pace = new Pace(() => {});
  const shares = Array.from({ length: 6 }, () => step(pace, 16, 100));
  expect(shares).toEqual([1, 1, 1, 1, 1, 1]);
});

test("all edges are drawn once it rests", () => {
  const redraw = vi.fn();
  const pace = new Pace(redraw);
  step(pace, 90, 0);
  step(pace, 90, 0);
  expect(redraw).not.toHaveBeenCalled();
  vi.advanceTimersByTime(300);
  expect(redraw).toHaveBeenCalledTimes(1);
  expect(pace.next()).toBe(1);
});
