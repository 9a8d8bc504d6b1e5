const WIDTH = 1024; // texels a row; the shaders know it

/** x and y of every node, where shaders can fetch them by a node's place. */
export class PositionTexture {
  private readonly texture: WebGLTexture;

  constructor(private readonly gl: WebGL2RenderingContext) {
    this.texture = gl.createTexture();
  }

  set(positions: Float32Array) {
    const { gl } = this;
    const rows = Math.max(1, Math.ceil(positions.length / 2 / WIDTH));
    const texels = new Float32Array(2 * WIDTH * rows);
    texels.set(positions);
    gl.bindTexture(gl.TEXTURE_2D, this.texture);
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RG32F, WIDTH, rows, 0, gl.RG, gl.FLOAT, texels);
    for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) {
      gl.texParameteri(gl.TEXTURE_2D, filter, gl.NEAREST);
    }
  }

  bind(unit: number) {
    this.gl.activeTexture(this.gl.TEXTURE0 + unit);
    this.gl.bindTexture(this.gl.TEXTURE_2D, this.texture);
  }
}
