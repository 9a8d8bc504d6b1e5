import { placeMemories, type Positions, type Shape } from "./shape";

const LEAF = 7; // between neighbouring chains, at the rim at least
const HUB = 24; // inner radius, at least
const FLATTEN = 0.72; // the start of chains, which many share, gets more room than their end
const STEP = 26;
const TRUNK = 0.6; // what so large a share of all chains have in common is laid as a sunflower's seeds
const SEED = 6;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));

/**
 * The prefix tree from above: what nearly all share in the middle, a session's own blocks as a ray.
 */
export function treeLayout(shape: Shape): Positions {
  const { blocks, depth } = shape;
  const order = byDepth(depth, blocks);
  const children = childrenOf(shape, order);
  const leaves = leavesOf(shape, order);
  const roots = order.filter((node) => shape.parent[node]! < 0).sort(siblings(shape));
  const total = roots.reduce((sum, root) => sum + leaves[root]!, 0);
  const trunk = new Set(order.filter((node) => leaves[node]! > TRUNK * total && total > 1));
  const deepest = blocks === 0 ? 0 : depth[order[blocks - 1]!]!;
  const rim = (LEAF * total) / (2 * Math.PI) - 0.6 * reach(deepest);
  const hub = Math.max(HUB + SEED * Math.sqrt(trunk.size), rim);

  const positions = new Float32Array(2 * shape.size);
  const from = new Float64Array(blocks);
  let angle = 0;
  for (const root of roots) {
    from[root] = angle;
    angle += leaves[root]!;
  }
  for (const node of order) {
    let next = from[node]!;
    const isTrunk = trunk.has(node);
    const turn = isTrunk
      ? GOLDEN * depth[node]!
      : ((next + leaves[node]! / 2) / Math.max(1, total)) * 2 * Math.PI;
    const radius = isTrunk
      ? SEED * Math.sqrt(depth[node]!)
      : hub + reach(Math.max(0, depth[node]! - trunk.size));
    positions[2 * node] = radius * Math.cos(turn);
    positions[2 * node + 1] = radius * Math.sin(turn);
    for (const child of children[node] ?? []) {
      from[child] = next;
      next += leaves[child]!;
    }
  }
  placeMemories(shape, positions);
  return positions;
}

/** How far from the hub a block of this depth stands. */
function reach(depth: number): number {
  return STEP * depth ** FLATTEN;
}

/** Blocks so that each stands after its parent. */
function byDepth(depth: Int32Array, blocks: number): number[] {
  return Array.from({ length: blocks }, (_, node) => node).sort((a, b) => depth[a]! - depth[b]!);
}

function siblings({ rank }: Shape) {
  return (a: number, b: number) => rank[a]! - rank[b]!;
}

function childrenOf(shape: Shape, order: readonly number[]): (number[] | undefined)[] {
  const children = new Array<number[] | undefined>(shape.blocks);
  for (const node of order) {
    const parent = shape.parent[node]!;
    if (parent >= 0) (children[parent] ??= []).push(node);
  }
  for (const each of children) each?.sort(siblings(shape));
  return children;
}

/** Chains that end below each block; itself where it is an end. */
function leavesOf({ parent, blocks }: Shape, order: readonly number[]): Float64Array {
  const leaves = new Float64Array(blocks);
  for (let at = order.length - 1; at >= 0; at--) {
    const node = order[at]!;
    leaves[node] ||= 1;
    if (parent[node]! >= 0) leaves[parent[node]!]! += leaves[node];
  }
  return leaves;
}
