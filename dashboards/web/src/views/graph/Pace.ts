const MOVING_MS = 250; // so long after somebody moved it, a graph counts as moving
const SLOW_MS = 45;
const LEAST = 1 / 16;

/** How much of its edges a graph shows while it moves: as many as the machine draws in time. */
export class Pace {
  private share = 1;
  private movedAt = -MOVING_MS;
  private rest: ReturnType<typeof setTimeout> | undefined;

  /** @param redraw Called once all has come to rest, if something was left out. */
  constructor(private readonly redraw: () => void) {}

  /** Somebody moves the graph. */
  moved() {
    this.movedAt = performance.now();
  }

  /** The share of edges for the frame that is drawn now. */
  next(): number {
    const now = performance.now();
    if (now - this.movedAt >= MOVING_MS) return 1;
    requestAnimationFrame(() => this.took(performance.now() - now));
    clearTimeout(this.rest);
    if (this.share < 1) this.rest = setTimeout(this.redraw, MOVING_MS);
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
