/** A linked WebGL2 program with its uniforms by name. */
export class Program {
  private readonly program: WebGLProgram;
  private readonly places = new Map<string, WebGLUniformLocation | null>();

  /** @throws Error What the driver said of the shaders. */
  constructor(
    private readonly gl: WebGL2RenderingContext,
    vertex: string,
    fragment: string,
  ) {
    this.program = gl.createProgram();
    gl.attachShader(this.program, compiled(gl, gl.VERTEX_SHADER, vertex));
    gl.attachShader(this.program, compiled(gl, gl.FRAGMENT_SHADER, fragment));
    gl.linkProgram(this.program);
    if (!gl.getProgramParameter(this.program, gl.LINK_STATUS)) {
      throw new Error(gl.getProgramInfoLog(this.program) ?? "a program did not link");
    }
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

  attribute(name: string): number {
    return this.gl.getAttribLocation(this.program, name);
  }
}

function compiled(gl: WebGL2RenderingContext, kind: number, source: string): WebGLShader {
  const shader = gl.createShader(kind);
  if (shader === null) throw new Error("the browser made no shader");
  gl.shaderSource(shader, source);
  gl.compileShader(shader);
  if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) {
    throw new Error(gl.getShaderInfoLog(shader) ?? "a shader did not compile");
  }
  return shader;
}
