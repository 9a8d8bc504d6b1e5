/** What a layout needs of a graph; a place a node. */
export interface Shape {
  readonly size: number;
  readonly blocks: number;
  readonly parent: Int32Array;
  readonly depth: Int32Array;
  readonly session: Int32Array;
  readonly idle: Float32Array;
  /** Orders siblings in the same way each time. */
  readonly rank: Uint32Array;
  readonly ends: Uint32Array;
  readonly offsets: readonly number[];
}

/** x and y of each node, one after the other. */
export type Positions = Float32Array<ArrayBuffer>;

export type LayoutName = "tree" | "force" | "timeline";

/** What the worker is asked; a newer question ends the work on an older one. */
export interface Question {
  readonly id: number;
  readonly layout: LayoutName;
  readonly shape: Shape;
  /** Where nodes stand already, NaN for new ones; null: nowhere. */
  readonly start: Positions | null;
}

/** Positions so far; `settled` when no others follow. */
export interface Answer {
  readonly id: number;
  readonly positions: Positions;
  readonly settled: boolean;
}

/** Puts what has no chain, a memory, beside the middle of the blocks that it is tied to. */
export function placeMemories({ size, blocks, ends }: Shape, positions: Positions) {
  const sums = new Float64Array(3 * (size - blocks));
  for (let at = 0; at < ends.length; at += 2) {
    const memory = 3 * (ends[at + 1]! - blocks);
    if (memory < 0) continue;
    sums[memory]! += positions[2 * ends[at]!]!;
    sums[memory + 1]! += positions[2 * ends[at]! + 1]!;
    sums[memory + 2]! += 1;
  }
  for (let node = blocks; node < size; node++) {
    const [x, y, count] = sums.subarray(3 * (node - blocks), 3 * (node - blocks) + 3);
    positions[2 * node] = count ? x! / count + 8 : 0;
    positions[2 * node + 1] = count ? y! / count + 8 : 0;
  }
}
