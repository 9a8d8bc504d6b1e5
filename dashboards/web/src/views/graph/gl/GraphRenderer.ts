import { type Colors, rgb } from "../../../parts/colors";
import { COLD, type GraphData, POOL, WARM } from "../GraphData";
import type { Positions } from "../layouts/shape";
import { boundsOf } from "./bounds";
import type { Camera } from "./Camera";
import { Picture, type Rect } from "./Picture";
import { PositionTexture } from "./PositionTexture";
import { ATTRIBUTE, Program } from "./Program";
import { EDGE_FRAGMENT, EDGE_VERTEX, NODE_FRAGMENT, NODE_VERTEX } from "./shaders";

const LOOK_BYTES = 4;
const INK = 0.16; // how dark all edges of a type are together: chosen
const ALL_TIERS = POOL | WARM | COLD;

/**
 * Draws a laid-out graph in WebGL2: four draw calls of points and lines, whatever their number.
 *
 * cosmos.gl, the field's, moves nodes inside its frame loop and knows no rings; layouts are a
 * worker's here, so that a frame costs the same while one is computed.
 */
export class GraphRenderer {
  private readonly edges: Program;
  private readonly nodes: Program;
  private readonly from: PositionTexture;
  private readonly to: PositionTexture;
  private readonly picture: Picture;
  private readonly edgeArray: WebGLVertexArrayObject;
  private readonly nodeArray: WebGLVertexArrayObject;
  private readonly edgeBuffer: WebGLBuffer;
  private readonly lookBuffer: WebGLBuffer;
  private data: GraphData | null = null;
  private inks: readonly number[] = [];
  private isChecked = false;

  /**
   * Begins to compile; the first `draw` waits for the end.
   *
   * @throws Error There is no WebGL2 here.
   */
  constructor(private readonly canvas: HTMLCanvasElement) {
    const gl = canvas.getContext("webgl2", { antialias: false, alpha: true, depth: false });
    if (gl === null) throw new Error("this browser has no WebGL2");
    this.gl = gl;
    this.edges = new Program(gl, EDGE_VERTEX, EDGE_FRAGMENT);
    this.nodes = new Program(gl, NODE_VERTEX, NODE_FRAGMENT);
    this.from = new PositionTexture(gl);
    this.to = new PositionTexture(gl);
    this.picture = new Picture(gl);
    this.edgeArray = gl.createVertexArray();
    this.nodeArray = gl.createVertexArray();
    this.edgeBuffer = this.attribute(this.edgeArray, 1, gl.UNSIGNED_INT);
    this.lookBuffer = this.attribute(this.nodeArray, 4, gl.UNSIGNED_BYTE);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  private readonly gl: WebGL2RenderingContext;

  /** Show `data` at `positions`; what was shown moves from `start` as the blend goes to 1. */
  place(data: GraphData, positions: Positions, start: Positions) {
    const { gl } = this;
    if (data !== this.data) {
      gl.bindBuffer(gl.ARRAY_BUFFER, this.edgeBuffer);
      gl.bufferData(gl.ARRAY_BUFFER, data.ends, gl.STATIC_DRAW);
    }
    this.data = data;
    this.inks = inksOf(data, positions);
    this.picture.forget();
    this.from.set(start);
    this.to.set(positions);
  }

  /** `emphasis` of each node: 0 dimmed, 1 as usual, 2 lit. */
  paint(data: GraphData, emphasis: Uint8Array) {
    const looks = new Uint8Array(LOOK_BYTES * data.size);
    for (let node = 0; node < data.size; node++) {
      looks[LOOK_BYTES * node] = data.layer[node]!;
      looks[LOOK_BYTES * node + 1] = data.tiers[node]! & ALL_TIERS;
      looks[LOOK_BYTES * node + 2] = emphasis[node]!;
      looks[LOOK_BYTES * node + 3] = data.importance[node]!;
    }
    this.gl.bindBuffer(this.gl.ARRAY_BUFFER, this.lookBuffer);
    this.gl.bufferData(this.gl.ARRAY_BUFFER, looks, this.gl.STATIC_DRAW);
    this.picture.forget();
  }

  /** One frame: edges of the `shown` types, then nodes; kept as the picture for `drawMoved`. */
  draw(camera: Camera, colors: Palette, look: Look, blend: number) {
    this.clear();
    this.check();
    this.drawGraph(camera, colors, look, blend);
    if (blend === 1) this.picture.take(camera, [this.canvas.width, this.canvas.height]);
    else this.picture.forget();
  }

  /** The last frame, where it belongs by now, and the graph itself in what that leaves bare. */
  drawMoved(camera: Camera, colors: Palette, look: Look) {
    const { gl } = this;
    this.clear();
    const bare = this.picture.draw(camera);
    if (bare === null) {
      this.draw(camera, colors, look, 1);
      return;
    }
    gl.enable(gl.SCISSOR_TEST);
    for (const part of bare) {
      this.cutTo(part, camera);
      this.drawGraph(camera, colors, look, 1);
    }
    gl.disable(gl.SCISSOR_TEST);
  }

  dispose() {
    this.gl.getExtension("WEBGL_lose_context")?.loseContext();
  }

  /** @throws Error What the driver said of the shaders; only once all are begun, which compile side by side. */
  private check() {
    if (this.isChecked) return;
    for (const program of [this.edges, this.nodes, this.picture.program]) program.check();
    this.isChecked = true;
  }

  private clear() {
    const { gl } = this;
    gl.viewport(0, 0, this.canvas.width, this.canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
  }

  private drawGraph(camera: Camera, colors: Palette, look: Look, blend: number) {
    const { data } = this;
    if (data === null) return;
    this.from.bind(0);
    this.to.bind(1);
    this.drawEdges(data, camera, colors, look, blend);
    this.drawNodes(data, camera, colors, blend);
  }

  /** Draw in a part of the canvas only, for as long as scissors are on. */
  private cutTo({ left, top, right, bottom }: Rect, { height }: Camera) {
    const { pixels } = this;
    const [first, last] = [Math.round(left * pixels), Math.round(right * pixels)];
    const [low, high] = [
      Math.round((height - bottom) * pixels),
      Math.round((height - top) * pixels),
    ];
    this.gl.scissor(first, low, last - first, high - low);
  }

  private drawEdges(data: GraphData, camera: Camera, colors: Palette, look: Look, blend: number) {
    const { gl } = this;
    this.ready(this.edges, camera, blend);
    gl.bindVertexArray(this.edgeArray);
    const lowestFirst = data.names.types.map((_, type) => type).reverse();
    lowestFirst.forEach((type) => {
      const [first, end] = [data.offsets[type]!, data.offsets[type + 1]!];
      if (!look.shown[type] || end === first) return;
      const ink = (look.isDimmed ? 0.35 : 1) / look.share;
      const alpha = Math.min(
        0.9,
        ink * Math.min(0.7, Math.max(0.012, (INK * camera.zoom) / this.inks[type]!)),
      );
      const [red, green, blue] = colors.types[type]!;
      gl.uniform4f(this.edges.uniform("uColor"), red * alpha, green * alpha, blue * alpha, alpha);
      gl.drawArrays(gl.LINES, 2 * first, 2 * Math.ceil(look.share * (end - first)));
    });
  }

  private drawNodes(data: GraphData, camera: Camera, colors: Palette, blend: number) {
    const { gl, nodes } = this;
    this.ready(nodes, camera, blend);
    gl.uniform1f(nodes.uniform("uSize"), this.pixels * nodeSize(camera, data.size));
    gl.uniform3fv(nodes.uniform("uLayers"), colors.layers.flat());
    gl.uniform3fv(nodes.uniform("uWarm"), colors.warm);
    gl.uniform3fv(nodes.uniform("uCold"), colors.cold);
    gl.bindVertexArray(this.nodeArray);
    gl.drawArrays(gl.POINTS, 0, data.size);
  }

  private ready(program: Program, camera: Camera, blend: number) {
    const { gl } = this;
    program.use();
    gl.uniform1i(program.uniform("uFrom"), 0);
    gl.uniform1i(program.uniform("uTo"), 1);
    gl.uniform1f(program.uniform("uBlend"), blend);
    gl.uniform2f(program.uniform("uCenter"), camera.x, camera.y);
    const [x, y] = [(2 * camera.zoom) / camera.width, (2 * camera.zoom) / camera.height];
    gl.uniform2f(program.uniform("uScale"), x, -y);
  }

  /** Device pixels a CSS pixel. */
  private get pixels(): number {
    return this.canvas.width / Math.max(1, this.canvas.clientWidth);
  }

  /** A buffer for the one attribute that a program has. */
  private attribute(array: WebGLVertexArrayObject, parts: number, kind: number): WebGLBuffer {
    const { gl } = this;
    const buffer = gl.createBuffer();
    gl.bindVertexArray(array);
    gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
    gl.enableVertexAttribArray(ATTRIBUTE);
    gl.vertexAttribIPointer(ATTRIBUTE, parts, kind, 0, 0);
    return buffer;
  }
}

/** How often edges of each type would cover the ground that the nodes stand on, at a zoom of 1. */
function inksOf(data: GraphData, positions: Positions): number[] {
  const area = groundOf(positions);
  return data.names.types.map((_, type) => {
    let length = 0;
    for (let edge = data.offsets[type]!; edge < data.offsets[type + 1]!; edge++) {
      const [one, other] = [2 * data.ends[2 * edge]!, 2 * data.ends[2 * edge + 1]!];
      length += Math.hypot(
        positions[one]! - positions[other]!,
        positions[one + 1]! - positions[other + 1]!,
      );
    }
    return Math.max(1e-6, length / area);
  });
}

function groundOf(positions: Positions): number {
  const { left, right, low, high } = boundsOf(positions);
  return Math.max(1, (right - left) * (high - low));
}

/** Diameter of a node of middling importance, in CSS pixels. */
function nodeSize(camera: Camera, nodes: number): number {
  const room = Math.sqrt((camera.width * camera.height) / Math.max(1, nodes));
  const least = Math.min(7, Math.max(2.4, 0.4 * room));
  return Math.min(26, Math.max(least, 6.5 * camera.zoom ** 0.75));
}

/** Which edges a frame shows: by type, whether they stand back, and what share of them. */
export interface Look {
  readonly shown: readonly boolean[];
  readonly isDimmed: boolean;
  readonly share: number;
}

type Rgb = [number, number, number];

/** The page's colours as shaders take them. */
export interface Palette {
  readonly layers: readonly Rgb[];
  readonly types: readonly Rgb[];
  readonly warm: Rgb;
  readonly cold: Rgb;
}

export function paletteOf(colors: Colors, { names }: GraphData): Palette {
  return {
    layers: [...names.layers, "memory_ref"].map((name) => rgb(colors(name))),
    types: names.types.map((name) => rgb(colors(name))),
    warm: rgb(colors("warm")),
    cold: rgb(colors("cold")),
  };
}
