import { ForceLayout } from "./force";
import type { Answer, Positions, Question } from "./shape";
import { timelineLayout } from "./timeline";
import { treeLayout } from "./tree";

const SHOW_EVERY_MS = 250;

let current = 0;

/** Computes layouts beside the page, so that no frame waits for one. */
self.onmessage = ({ data }: MessageEvent<Question>) => {
  current = data.id;
  if (data.layout === "tree") answer(data.id, treeLayout(data.shape), true);
  else if (data.layout === "timeline") answer(data.id, timelineLayout(data.shape), true);
  else settle(data.id, new ForceLayout(data.shape, data.start));
};

/** Ticks for a while, shows where things are, and lets newer questions in. */
function settle(id: number, force: ForceLayout) {
  if (id !== current) return;
  const until = performance.now() + SHOW_EVERY_MS;
  while (!force.settled && performance.now() < until) force.tick();
  answer(id, force.positions(), force.settled);
  if (!force.settled) setTimeout(() => settle(id, force));
}

function answer(id: number, positions: Positions, settled: boolean) {
  const said: Answer = { id, positions, settled };
  self.postMessage(said, { transfer: [positions.buffer] });
}
