import { Camera } from "./gl/Camera";
import { GraphRenderer, type Palette } from "./gl/GraphRenderer";
import { NodeGrid } from "./gl/NodeGrid";
import { chainOf, type GraphData } from "./GraphData";
import { carriedOver, type Layout } from "./layouts/useLayout";
import { Pace } from "./Pace";

const MOVE_MS = 450;
const REACH = 12; // pixels within which a node is meant
const NEAR = 1.6; // pixels a unit, at most, where a single block is shown
const MOST_PIXELS = 2; // device pixels a CSS pixel

/** A canvas with a graph on it: what is where, and one frame when something changed. */
export class GraphStage {
  readonly camera = new Camera();
  /** Called after each frame, with what was drawn. */
  onFrame: () => void = () => {};
  /** Called where the driver refuses what is to be drawn. */
  onBroken: () => void = () => {};

  private readonly renderer: GraphRenderer;
  private layout: Layout | null = null;
  private grid: NodeGrid | null = null;
  private palette: Palette | null = null;
  private shown: readonly boolean[] = [];
  private dimEdges = false;
  private movedAt = -MOVE_MS;
  private frame = 0;
  private isFitted = false;
  private readonly pace = new Pace(() => this.redraw());

  /** @throws Error There is no WebGL2 here. */
  constructor(private readonly canvas: HTMLCanvasElement) {
    this.renderer = new GraphRenderer(canvas);
  }

  resize() {
    const { canvas, camera } = this;
    const pixels = Math.min(MOST_PIXELS, window.devicePixelRatio);
    camera.width = Math.max(1, canvas.clientWidth);
    camera.height = Math.max(1, canvas.clientHeight);
    canvas.width = Math.round(camera.width * pixels);
    canvas.height = Math.round(camera.height * pixels);
    if (this.layout !== null && !this.isFitted) this.fit();
    this.redraw();
  }

  place(layout: Layout) {
    const before = this.layout;
    const isOther = before?.name !== layout.name;
    const start = before === null ? layout.positions : this.startOf(before, layout);
    this.renderer.place(layout.data, layout.positions, start);
    this.layout = layout;
    this.grid = null;
    this.movedAt = before === null ? -MOVE_MS : performance.now();
    if (isOther) this.isFitted = false;
    if (!this.isFitted) this.fit(layout.settled);
    this.redraw();
  }

  paint(data: GraphData, emphasis: Uint8Array, palette: Palette, shown: readonly boolean[]) {
    this.renderer.paint(data, emphasis);
    this.palette = palette;
    this.shown = shown;
    this.dimEdges = emphasis.includes(0);
    this.redraw();
  }

  fit(forGood = true) {
    if (this.layout === null) return;
    this.camera.fit(this.layout.positions);
    this.isFitted = forGood;
    this.redraw();
  }

  /** Show a block and the chain that leads to it. */
  show(node: number) {
    const { layout } = this;
    if (layout === null || node >= layout.data.size) return;
    const chain = chainOf(layout.data, node);
    const places = chain.flatMap((each) => [...layout.positions.subarray(2 * each, 2 * each + 2)]);
    this.camera.fit(Float32Array.from(places));
    this.camera.zoom = Math.min(NEAR, this.camera.zoom);
    this.keep();
  }

  /** Keep what the camera shows: somebody chose it. */
  keep() {
    this.isFitted = true;
    this.pace.moved();
    this.redraw();
  }

  nodeAt(px: number, py: number): number {
    if (this.layout === null) return -1;
    this.grid ??= new NodeGrid(this.layout.positions); // at the first question: not before a paint
    const [x, y] = this.camera.toPlane(px, py);
    return this.grid.nearest(x, y, REACH / this.camera.zoom);
  }

  pixelsOf(node: number): [number, number] | null {
    const positions = this.layout?.positions;
    if (positions === undefined || 2 * node >= positions.length) return null;
    return this.camera.toPixels(positions[2 * node]!, positions[2 * node + 1]!);
  }

  redraw() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  dispose() {
    cancelAnimationFrame(this.frame);
    this.pace.stop();
    this.renderer.dispose();
  }

  private draw() {
    this.frame = 0;
    if (this.palette === null) return;
    const part = Math.min(1, (performance.now() - this.movedAt) / MOVE_MS);
    const blend = part * part * (3 - 2 * part);
    if (part < 1) this.pace.moved();
    const look = { shown: this.shown, isDimmed: this.dimEdges, share: this.pace.next() };
    try {
      const asIs = this.pace.isMoving && part === 1;
      if (asIs) this.renderer.drawMoved(this.camera, this.palette, look);
      else this.renderer.draw(this.camera, this.palette, look, blend);
    } catch {
      this.onBroken();
      return;
    }
    this.onFrame();
    if (part < 1) this.redraw();
  }

  /** Where nodes of the new layout stood in the old one; new ones where they will stand. */
  private startOf(before: Layout, layout: Layout) {
    const start = before.data === layout.data ? before.positions : carriedOver(before, layout.data);
    return start.map((value, at) => (Number.isNaN(value) ? layout.positions[at]! : value));
  }
}
