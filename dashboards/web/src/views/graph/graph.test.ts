import { expect, test } from "vitest";

import type { GraphView } from "../../api/types";
import { describe, whereIs } from "./describe";
import { emphasisOf, found } from "./emphasis";
import { NodeGrid } from "./gl/NodeGrid";
import { chainOf, edgesOf, toColumns } from "./GraphData";
import type { Shape } from "./layouts/shape";
import { timelineLayout } from "./layouts/timeline";
import { treeLayout } from "./layouts/tree";

/** A chain of two that branches into two, and a memory. */
function view(): GraphView {
  const nodes = {
    key: ["0x0a", "0x0b", "0x0c", "0x0d"],
    parent: [-1, 0, 1, 1],
    depth: [0, 1, 2, 2],
    layer: [2, 4, 7, 7],
    importance: [90, 50, 35, 35],
    tiers: [1, 3, 1, 4],
    engines: [1, 1, 1, 0],
    flags: [2, 2, 0, 0],
    hits: [9, 9, 1, 0],
    idle_s: [0, 0, 5, 100],
    session: [-1, -1, 0, 1],
    tenant: [-1, -1, 0, 0],
    segment: [0, -1, -1, -1],
  };
  const links = {
    source: [0, 1, 1, 0],
    target: [1, 2, 3, 4],
    type: [0, 0, 0, 5],
    weight: [1, 1, 1, 1],
  };
  const layers =
    "axioms identity rules capabilities context memories affect tool_result user_turn generation";
  const types = "prefix_share co_attend semantic temporal spill_link memory_ref";
  const names = {
    layers: layers.split(" "),
    types: types.split(" "),
    sessions: ["one", "Two"],
    tenants: ["acme"],
    segments: ["house rules"],
    engines: ["e"],
    memories: ["m"],
  };
  return { at: 0, version: 1, blocks: 4, edges: 4, left_out: 0, nodes, links, names };
}

function shape(): Shape {
  const data = toColumns(view());
  return { ...data, rank: Uint32Array.from(data.key, (_, place) => place) };
}

test("edges are sorted by type, and memories are nodes after the blocks", () => {
  const data = toColumns(view());
  expect([data.blocks, data.size]).toEqual([4, 5]);
  expect([edgesOf(data, 0), edgesOf(data, 1), edgesOf(data, 5)]).toEqual([3, 0, 1]);
  expect([...data.ends.slice(-2)]).toEqual([0, 4]);
});

test("a selection lights its chain and dims other branches", () => {
  const data = toColumns(view());
  expect(chainOf(data, 2)).toEqual([0, 1, 2]);
  expect([...emphasisOf(data, 2, "")]).toEqual([2, 2, 2, 0, 0]);
  expect([...emphasisOf(data, 1, "")]).toEqual([2, 2, 1, 1, 0]);
});

test("a search finds sessions, layers and keys, whatever their case", () => {
  const data = toColumns(view());
  expect(found(data, "two")).toEqual([3]);
  expect(found(data, "house")).toEqual([0]);
  expect(found(data, "tool result")).toEqual([2, 3]);
  expect(found(data, "0X0B")).toEqual([1]);
});

test("a block is counted from one, and says where its bytes are", () => {
  const data = toColumns(view());
  expect(describe(data, 3)[0]).toBe("tool result, block 3 of Two");
  expect(whereIs(data, 1)).toBe("in pool and warm");
  expect(whereIs({ ...data, tiers: new Uint8Array(data.size) }, 1)).toBe(
    "in no pool or tier, only remembered",
  );
});

test("in the tree what all share is in the middle, and branches part", () => {
  const at = treeLayout(shape());
  const far = (node: number) => Math.hypot(at[2 * node]!, at[2 * node + 1]!);
  expect(far(1)).toBeLessThan(far(2));
  expect(Math.hypot(at[4]! - at[6]!, at[5]! - at[7]!)).toBeGreaterThan(20);
  expect([...at].every(Number.isFinite)).toBe(true);
});

test("on the timeline what was used last stands at the right", () => {
  const at = timelineLayout(shape());
  expect(at[0]).toBeGreaterThan(at[4]!);
  expect(at[4]).toBeGreaterThan(at[6]!);
});

test("the nearest node is found, and none too far away", () => {
  const grid = new NodeGrid(new Float32Array([0, 0, 10, 0, 100, 100]));
  expect(grid.nearest(9, 1, 5)).toBe(1);
  expect(grid.nearest(50, 50, 5)).toBe(-1);
});
