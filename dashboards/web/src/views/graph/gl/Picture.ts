import type { Camera } from "./Camera";
import { Program } from "./Program";
import { PICTURE_FRAGMENT, PICTURE_VERTEX } from "./shaders";

/** A part of the canvas, in CSS pixels from its upper left. */
export interface Rect {
  readonly left: number;
  readonly top: number;
  readonly right: number;
  readonly bottom: number;
}

type View = Pick<Camera, "x" | "y" | "zoom" | "width" | "height">;

const MOST_BARE = 0.5; // share of the canvas that a moved picture may leave bare: chosen
const MOST_ZOOM = 2; // how far it may be stretched, or shrunk: chosen

/** A frame that was drawn, to be moved about for as long as somebody drags or zooms. */
export class Picture {
  readonly program: Program;
  private readonly texture: WebGLTexture;
  private readonly array: WebGLVertexArrayObject;
  private taken: View | null = null;

  constructor(private readonly gl: WebGL2RenderingContext) {
    this.program = new Program(gl, PICTURE_VERTEX, PICTURE_FRAGMENT);
    this.texture = gl.createTexture();
    this.array = gl.createVertexArray();
  }

  /** Keep what the canvas shows now. */
  take({ x, y, zoom, width, height }: Camera, pixels: [number, number]) {
    const { gl } = this;
    gl.activeTexture(gl.TEXTURE0);
    gl.bindTexture(gl.TEXTURE_2D, this.texture);
    gl.copyTexImage2D(gl.TEXTURE_2D, 0, gl.RGBA, 0, 0, ...pixels, 0);
    for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) {
      gl.texParameteri(gl.TEXTURE_2D, filter, gl.LINEAR);
    }
    for (const side of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T]) {
      gl.texParameteri(gl.TEXTURE_2D, side, gl.CLAMP_TO_EDGE);
    }
    this.taken = { x, y, zoom, width, height };
  }

  /** It shows no longer what is. */
  forget() {
    this.taken = null;
  }

  /** Draw it where it belongs now; what it leaves bare, or null where it is of little use. */
  draw(camera: Camera): Rect[] | null {
    if (this.taken === null) return null;
    const place = placeOf(this.taken, camera);
    const bare = bareOf(place, camera);
    if (isOfLittleUse(this.taken, bare, camera)) return null;
    const { gl, program } = this;
    const [x, y] = [2 / camera.width, 2 / camera.height];
    program.use();
    gl.activeTexture(gl.TEXTURE0);
    gl.bindTexture(gl.TEXTURE_2D, this.texture);
    gl.uniform1i(program.uniform("uPicture"), 0);
    const [left, right] = [place.left * x - 1, place.right * x - 1];
    gl.uniform4f(program.uniform("uPlace"), left, 1 - place.bottom * y, right, 1 - place.top * y);
    gl.bindVertexArray(this.array);
    gl.drawArrays(gl.TRIANGLE_STRIP, 0, 4);
    return bare;
  }
}

/** Where the corners of what was seen `then` are on the canvas now. */
export function placeOf(then: View, camera: Camera): Rect {
  const [x, y] = [then.width / (2 * then.zoom), then.height / (2 * then.zoom)];
  const [left, top] = camera.toPixels(then.x - x, then.y - y);
  const [right, bottom] = camera.toPixels(then.x + x, then.y + y);
  return { left, top, right, bottom };
}

/** What of the canvas `place` does not cover: parts that do not overlap. */
export function bareOf(place: Rect, { width, height }: View): Rect[] {
  const clamp = (value: number, most: number) => Math.min(most, Math.max(0, Math.round(value)));
  const [left, right] = [clamp(place.left, width), clamp(place.right, width)];
  const [top, bottom] = [clamp(place.top, height), clamp(place.bottom, height)];
  const parts = [
    { left: 0, top: 0, right: left, bottom: height },
    { left: right, top: 0, right: width, bottom: height },
    { left, top: 0, right, bottom: top },
    { left, top: bottom, right, bottom: height },
  ];
  return parts.filter((part) => part.right > part.left && part.bottom > part.top);
}

function isOfLittleUse(then: View, bare: readonly Rect[], { width, height, zoom }: View): boolean {
  if (then.width !== width || then.height !== height) return true;
  const stretch = Math.max(zoom / then.zoom, then.zoom / zoom);
  const area = bare.reduce((sum, part) => sum + areaOf(part), 0);
  return stretch > MOST_ZOOM || area > MOST_BARE * width * height;
}

function areaOf({ left, top, right, bottom }: Rect): number {
  return (right - left) * (bottom - top);
}
