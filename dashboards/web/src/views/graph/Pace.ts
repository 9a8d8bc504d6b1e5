const MOVING_MS = 250; // so long after somebody moved it, a graph counts as moving
const SLOW_MS = 45;
const LEAST = 1 / 16;

/**
 * How much of its edges a graph shows where it is drawn while it moves: as many as the machine
 * draws in time. At rest it is drawn whole.
 */
export class Pace {
  private share = 1;
  private movedAt = -MOVING_MS;
  private rest: ReturnType<typeof setTimeout> | undefined;

  /** @param redraw Called once all has come to rest. */
  constructor(private readonly redraw: () => void) {}

  /** Somebody moves the graph. */
  moved() {
    this.movedAt = performance.now();
  }

  /** Whether somebody moved it just now. */
  get isMoving(): boolean {
    return performance.now() - this.movedAt < MOVING_MS;
  }

  /** The share of edges for the frame that is drawn now. */
  next(): number {
    const now = performance.now();
    if (!this.isMoving) return 1;
    requestAnimationFrame(() => this.took(performance.now() - now));
    clearTimeout(this.rest);
    this.rest = setTimeout(this.redraw, MOVING_MS);
    return this.share;
  }

  /** A frame took so long, until the browser had room for another. */
  private took(ms: number) {
    this.share = ms > SLOW_MS ? Math.max(LEAST, this.share / 2) : Math.min(1, this.share * 1.1);
  }

  stop() {
    clearTimeout(this.rest);
  }
}
