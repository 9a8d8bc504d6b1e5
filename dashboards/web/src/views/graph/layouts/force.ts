import {
  forceLink,
  forceManyBody,
  forceSimulation,
  forceX,
  forceY,
  type Simulation,
  type SimulationLinkDatum,
  type SimulationNodeDatum,
} from "d3-force";

import type { Positions, Shape } from "./shape";
import { treeLayout } from "./tree";

const ALONG_CHAINS = [0, 3]; // prefix_share and temporal
const WARM_ALPHA = 0.25; // where most stand already

/** Forces between nodes, one `tick` at a time; d3's, as the field knows them. */
export class ForceLayout {
  private readonly nodes: SimulationNodeDatum[];
  private readonly simulation: Simulation<SimulationNodeDatum, Link>;

  constructor(shape: Shape, start: Positions | null) {
    this.nodes = startNodes(shape, start);
    this.simulation = forceSimulation(this.nodes)
      .force("charge", forceManyBody().strength(-16).theta(1.3))
      .force("chain", forceLink(chainLinks(shape)).distance(7).strength(0.9))
      .force("others", forceLink(otherLinks(shape)).distance(40).strength(0.02))
      .force("x", forceX(0).strength(0.02))
      .force("y", forceY(0).strength(0.02))
      .alphaDecay(0.05)
      .stop();
    if (start !== null) this.simulation.alpha(WARM_ALPHA);
  }

  get settled(): boolean {
    return this.simulation.alpha() < this.simulation.alphaMin();
  }

  tick() {
    this.simulation.tick();
  }

  positions(): Positions {
    const positions = new Float32Array(2 * this.nodes.length);
    this.nodes.forEach((node, place) => positions.set([node.x ?? 0, node.y ?? 0], 2 * place));
    return positions;
  }
}

/** Where nodes begin: where they stand, beside their parents, or in a small prefix tree. */
function startNodes(shape: Shape, start: Positions | null): SimulationNodeDatum[] {
  const at = start ?? treeLayout(shape).map((place) => 0.35 * place);
  const order = Array.from({ length: shape.size }, (_, node) => node);
  order.sort((a, b) => shape.depth[a]! - shape.depth[b]!);
  for (const node of order.filter((each) => Number.isNaN(at[2 * each]))) {
    const parent = 2 * shape.parent[node]!;
    at[2 * node] = (at[parent] ?? 0) + (node % 7) - 3;
    at[2 * node + 1] = (at[parent + 1] ?? 0) + (node % 5) - 2;
  }
  return order.map((_, node) => ({ index: node, x: at[2 * node]!, y: at[2 * node + 1]! }));
}

type Link = SimulationLinkDatum<SimulationNodeDatum>;

/** A block and the one before it in its chain hold together, whatever edges they have. */
function chainLinks({ parent, blocks }: Shape): Link[] {
  const links: Link[] = [];
  for (let node = 0; node < blocks; node++) {
    if (parent[node]! >= 0) links.push({ source: parent[node]!, target: node });
  }
  return links;
}

function otherLinks({ ends, offsets }: Shape): Link[] {
  const links: Link[] = [];
  for (let type = 0; type + 1 < offsets.length; type++) {
    if (ALONG_CHAINS.includes(type)) continue;
    for (let edge = offsets[type]!; edge < offsets[type + 1]!; edge++) {
      links.push({ source: ends[2 * edge]!, target: ends[2 * edge + 1]! });
    }
  }
  return links;
}
