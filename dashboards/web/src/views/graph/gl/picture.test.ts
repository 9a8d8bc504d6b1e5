import { expect, test } from "vitest";

import { Camera } from "./Camera";
import { bareOf, placeOf } from "./Picture";

function camera(): Camera {
  const made = new Camera();
  [made.width, made.height, made.zoom] = [400, 300, 2];
  return made;
}

/** What is bare of a canvas whose picture was taken before it was moved. */
function bareAfter(move: (camera: Camera) => void) {
  const now = camera();
  const then = { ...camera() };
  move(now);
  return bareOf(placeOf(then, now), now);
}

test("a picture that was not moved covers all", () => {
  expect(bareAfter(() => {})).toEqual([]);
});

test("dragged to the right and down it leaves a strip on the left and one on top", () => {
  expect(bareAfter((camera) => camera.pan(30, 20))).toEqual([
    { left: 0, top: 0, right: 30, bottom: 300 },
    { left: 30, top: 0, right: 400, bottom: 20 },
  ]);
});

test("made smaller it leaves a frame, whose parts do not overlap", () => {
  const bare = bareAfter((camera) => camera.zoomAt(0.5, 200, 150));
  const area = bare.reduce((sum, { left, top, right, bottom }) => {
    return sum + (right - left) * (bottom - top);
  }, 0);
  expect(area).toBe(400 * 300 - 200 * 150);
});

test("made larger it leaves nothing", () => {
  expect(bareAfter((camera) => camera.zoomAt(2, 50, 50))).toEqual([]);
});
