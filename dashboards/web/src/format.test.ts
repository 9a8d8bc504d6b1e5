import { expect, test } from "vitest";

import { counted, duration, percent, points, shortKey } from "./format";

test("nothing of nothing is unknown, and zero is not", () => {
  expect(percent(0, 0)).toBe("–");
  expect(percent(null)).toBe("–");
  expect(percent(0, 10)).toBe("0 %");
  expect(percent(212, 213)).toBe(">99 %");
  expect(percent(9_999_999, 10_000_000, 1)).toBe(">99.9 %");
  expect(percent(213, 213)).toBe("100 %");
});

test("one of something is not many", () => {
  expect(counted(1, "request")).toBe("1 request");
  expect(counted(0, "request")).toBe("0 requests");
  expect(counted(1200, "block")).toBe("1,200 blocks");
  expect(counted(null, "block")).toBe("– blocks");
});

test("durations keep two digits or so", () => {
  expect(duration(0.31)).toBe("310 ms");
  expect(duration(84)).toBe("84 s");
  expect(duration(600)).toBe("10 min");
  expect(duration(-8000)).toBe("-2.2 h");
});

test("a difference says its direction", () => {
  expect(points(0.178)).toBe("+17.8 points");
  expect(points(-0.05)).toBe("−5.0 points");
});

test("only keys are cut", () => {
  expect(shortKey("0x0123456789abcdef")).toBe("…89abcdef");
  expect(shortKey("a memory")).toBe("a memory");
});
