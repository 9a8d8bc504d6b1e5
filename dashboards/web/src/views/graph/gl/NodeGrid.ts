/** Finds the node nearest to a place: nodes sorted into square cells. */
export class NodeGrid {
  private readonly cells = new Map<number, number[]>();
  private readonly side: number;

  constructor(private readonly positions: Float32Array) {
    const nodes = positions.length / 2;
    let reach = 1;
    for (const value of positions) reach = Math.max(reach, Math.abs(value));
    this.side = (2 * reach) / Math.max(1, Math.sqrt(nodes));
    for (let node = 0; node < nodes; node++) {
      const cell = this.cellAt(positions[2 * node]!, positions[2 * node + 1]!);
      const there = this.cells.get(cell);
      if (there === undefined) this.cells.set(cell, [node]);
      else there.push(node);
    }
  }

  /** The node nearest to x, y within `radius`; -1: none. */
  nearest(x: number, y: number, radius: number): number {
    const span = Math.min(8, Math.ceil(radius / this.side));
    let [found, best] = [-1, radius * radius];
    for (let dx = -span; dx <= span; dx++) {
      for (let dy = -span; dy <= span; dy++) {
        const cell = this.cellAt(x + dx * this.side, y + dy * this.side);
        for (const node of this.cells.get(cell) ?? []) {
          const far =
            (this.positions[2 * node]! - x) ** 2 + (this.positions[2 * node + 1]! - y) ** 2;
          if (far < best) [found, best] = [node, far];
        }
      }
    }
    return found;
  }

  private cellAt(x: number, y: number): number {
    return Math.floor(x / this.side) * 1_000_003 + Math.floor(y / this.side);
  }
}
