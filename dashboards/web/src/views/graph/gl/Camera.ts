import { boundsOf } from "./bounds";

/** What part of the plane a canvas shows; sizes are in CSS pixels. */
export class Camera {
  x = 0;
  y = 0;
  /** Pixels a unit of the plane. */
  zoom = 1;
  width = 1;
  height = 1;

  /** Show all of `positions`, with a margin of a twelfth. */
  fit(positions: Float32Array) {
    const { left, right, low, high } = boundsOf(positions);
    if (left > right) return;
    this.x = (left + right) / 2;
    this.y = (low + high) / 2;
    const spread = Math.max((right - left) / this.width, (high - low) / this.height);
    this.zoom = spread === 0 ? 1 : 1 / (1.12 * spread);
  }

  pan(dx: number, dy: number) {
    this.x -= dx / this.zoom;
    this.y -= dy / this.zoom;
  }

  /** Zoom by `factor`, keeping what is at a pixel there. */
  zoomAt(factor: number, px: number, py: number) {
    const [x, y] = this.toPlane(px, py);
    this.zoom = Math.min(60, Math.max(1e-4, this.zoom * factor));
    this.x = x - (px - this.width / 2) / this.zoom;
    this.y = y - (py - this.height / 2) / this.zoom;
  }

  toPlane(px: number, py: number): [number, number] {
    return [
      this.x + (px - this.width / 2) / this.zoom,
      this.y + (py - this.height / 2) / this.zoom,
    ];
  }

  toPixels(x: number, y: number): [number, number] {
    return [(x - this.x) * this.zoom + this.width / 2, (y - this.y) * this.zoom + this.height / 2];
  }
}
