import { placeMemories, type Positions, type Shape } from "./shape";

const DECADE = 420; // ten times as long ago
const SLENDER = 0.6; // height beside width
const LANES = 12; // as many have the room of one that is full
const BLOCK = 2.5; // between blocks that were used together

/** A lane a session, the latest on top; what was used last stands at the right. */
export function timelineLayout(shape: Shape): Positions {
  const lanes = lanesOf(shape);
  const positions = new Float32Array(2 * shape.size);
  const oldest = shape.idle.reduce((most, each) => Math.max(most, each), 9);
  const lane = (SLENDER * -timeAt(oldest)) / Math.max(LANES, lanes.size);
  const order = Array.from({ length: shape.blocks }, (_, node) => node);
  order.sort((a, b) => shape.depth[b]! - shape.depth[a]!);
  const together = new Map<string, number>();
  for (const node of order) {
    const group = `${shape.session[node]} ${shape.idle[node]}`;
    const place = together.get(group) ?? 0;
    together.set(group, place + 1);
    positions[2 * node] = timeAt(shape.idle[node]!) - BLOCK * place;
    positions[2 * node + 1] = lane * lanes.get(shape.session[node]!)!;
  }
  placeMemories(shape, positions);
  return positions;
}

/** Where what was last used so many seconds ago stands. */
export function timeAt(seconds: number): number {
  return -DECADE * Math.log10(1 + seconds);
}

/** The lane of each session, by when it was last used; blocks of none share one. */
function lanesOf({ session, idle, blocks }: Shape): Map<number, number> {
  const latest = new Map<number, number>();
  for (let node = 0; node < blocks; node++) {
    const name = session[node]!;
    latest.set(name, Math.min(latest.get(name) ?? Infinity, idle[node]!));
  }
  const order = [...latest].sort((a, b) => a[1] - b[1] || a[0] - b[0]);
  return new Map(order.map(([name], lane) => [name, lane]));
}
