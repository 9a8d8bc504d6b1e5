/** Where the one attribute of a program's vertices stands. */
export const ATTRIBUTE = 0;

/** A linked WebGL2 program with its uniforms by name. */
export class Program {
  private readonly program: WebGLProgram;
  private readonly shaders: readonly WebGLShader[];
  private readonly places = new Map<string, WebGLUniformLocation | null>();

  /** Begins to compile and link; `check` waits for the end. */
  constructor(
    private readonly gl: WebGL2RenderingContext,
    vertex: string,
    fragment: string,
  ) {
    this.program = gl.createProgram();
    this.shaders = [begun(gl, gl.VERTEX_SHADER, vertex), begun(gl, gl.FRAGMENT_SHADER, fragment)];
    for (const shader of this.shaders) gl.attachShader(this.program, shader);
    gl.linkProgram(this.program);
  }

  /** @throws Error What the driver said of the shaders. */
  check() {
    const { gl, program } = this;
    if (gl.getProgramParameter(program, gl.LINK_STATUS)) return;
    const said = [gl.getProgramInfoLog(program), ...this.shaders.map(gl.getShaderInfoLog, gl)];
    throw new Error(said.filter(Boolean).join("\n") || "a program did not link");
  }

  use() {
    this.gl.useProgram(this.program);
  }

  uniform(name: string): WebGLUniformLocation | null {
    if (!this.places.has(name)) {
      this.places.set(name, this.gl.getUniformLocation(this.program, name));
    }
    return this.places.get(name) ?? null;
  }
}

function begun(gl: WebGL2RenderingContext, kind: number, source: string): WebGLShader {
  const shader = gl.createShader(kind);
  if (shader === null) throw new Error("the browser made no shader");
  gl.shaderSource(shader, source);
  gl.compileShader(shader);
  return shader;
}
