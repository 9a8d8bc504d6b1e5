import type { GraphView } from "../../api/types";

/** Bits of `tiers`. */
export const POOL = 1;
export const WARM = 2;
export const COLD = 4;

/** Bits of `flags`. */
export const SUPERSEDED = 1;
export const SHARED = 2;

/** The layer of nodes that are no blocks but memories, beside the API's ten. */
export const MEMORY = 10;

/**
 * The graph in columns: a place a node, blocks first and then memories.
 *
 * Edges are sorted by type; those of type `t` are `offsets[t]` to `offsets[t + 1]`, strewn so that
 * the first of them stand for all.
 */
export interface GraphData {
  readonly version: number;
  readonly known: { readonly blocks: number; readonly edges: number };
  readonly blocks: number;
  readonly size: number;
  readonly key: readonly string[];
  readonly parent: Int32Array;
  readonly depth: Int32Array;
  readonly layer: Uint8Array;
  readonly importance: Uint8Array;
  readonly tiers: Uint8Array;
  readonly flags: Uint8Array;
  readonly hits: Uint32Array;
  readonly idle: Float32Array;
  readonly session: Int32Array;
  readonly tenant: Int32Array;
  readonly segment: Int32Array;
  readonly ends: Uint32Array;
  readonly leftOut: number;
  readonly offsets: readonly number[];
  readonly names: GraphView["names"];
}

const EMPTY: GraphView = {
  at: 0,
  version: -1,
  blocks: 0,
  edges: 0,
  left_out: 0,
  nodes: {
    key: [],
    parent: [],
    depth: [],
    layer: [],
    importance: [],
    tiers: [],
    engines: [],
    flags: [],
    hits: [],
    idle_s: [],
    session: [],
    tenant: [],
    segment: [],
  },
  links: { source: [], target: [], type: [], weight: [] },
  names: {
    layers: [],
    types: [],
    sessions: [],
    tenants: [],
    segments: [],
    engines: [],
    memories: [],
  },
};

export function toColumns(view: GraphView): GraphData {
  const { nodes, names } = view;
  const blocks = nodes.key.length;
  const size = blocks + names.memories.length;
  const column = <
    T extends { set(from: ArrayLike<number>): void; fill(value: number, start: number): unknown },
  >(
    made: T,
    from: ArrayLike<number>,
    rest: number,
  ): T => {
    made.set(from);
    made.fill(rest, blocks);
    return made;
  };
  return {
    version: view.version,
    known: { blocks: view.blocks, edges: view.edges },
    blocks,
    size,
    key: [...nodes.key, ...names.memories],
    parent: column(new Int32Array(size), nodes.parent, -1),
    depth: column(new Int32Array(size), nodes.depth, 0),
    layer: column(new Uint8Array(size), nodes.layer, MEMORY),
    importance: column(new Uint8Array(size), nodes.importance, 60),
    tiers: column(new Uint8Array(size), nodes.tiers, POOL),
    flags: column(new Uint8Array(size), nodes.flags, 0),
    hits: column(new Uint32Array(size), nodes.hits, 0),
    idle: column(new Float32Array(size), nodes.idle_s, 0),
    session: column(new Int32Array(size), nodes.session, -1),
    tenant: column(new Int32Array(size), nodes.tenant, -1),
    segment: column(new Int32Array(size), nodes.segment, -1),
    ...sortedEdges(view),
    leftOut: view.left_out,
    names,
  };
}

function sortedEdges({ links, names }: GraphView): Pick<GraphData, "ends" | "offsets"> {
  const counts = new Array<number>(names.types.length + 1).fill(0);
  for (const type of links.type) counts[type + 1] = (counts[type + 1] ?? 0) + 1;
  for (let type = 1; type < counts.length; type++) counts[type]! += counts[type - 1]!;
  const nth = new Array<number>(names.types.length).fill(0);
  const ends = new Uint32Array(2 * links.type.length);
  links.type.forEach((type, edge) => {
    const count = counts[type + 1]! - counts[type]!;
    const place = counts[type]! + strewn(nth[type]!++, count);
    ends[2 * place] = links.source[edge]!;
    ends[2 * place + 1] = links.target[edge]!;
  });
  return { ends, offsets: counts };
}

const PRIME = 7919; // far from any neighbour, and a divisor of few counts

function strewn(nth: number, count: number): number {
  return count % PRIME === 0 ? nth : (nth * PRIME) % count;
}

/** What stands for a graph until there is one. */
export const NOTHING: GraphData = toColumns(EMPTY);

/** How many edges there are of a type. */
export function edgesOf(data: GraphData, type: number): number {
  return (data.offsets[type + 1] ?? 0) - (data.offsets[type] ?? 0);
}

/** The blocks from the start of a block's chain down to it. */
export function chainOf(data: GraphData, node: number): number[] {
  const chain: number[] = [];
  for (let at = node; at >= 0; at = data.parent[at] ?? -1) chain.push(at);
  return chain.reverse();
}

/** The places of blocks by their keys. */
export function placesOf(data: GraphData): Map<string, number> {
  return new Map(data.key.map((key, place) => [key, place]));
}
