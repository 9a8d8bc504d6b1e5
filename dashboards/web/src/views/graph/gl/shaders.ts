/** Positions stand in textures, so that edges find both their ends and moves are blended here. */
const PLACE = `
uniform highp sampler2D uFrom;
uniform highp sampler2D uTo;
uniform float uBlend;
uniform vec2 uCenter;
uniform vec2 uScale;

vec2 placeOf(int node) {
  ivec2 at = ivec2(node % 1024, node / 1024);
  return mix(texelFetch(uFrom, at, 0).xy, texelFetch(uTo, at, 0).xy, uBlend);
}

vec4 onScreen(vec2 place) {
  return vec4((place - uCenter) * uScale, 0.0, 1.0);
}
`;

export const EDGE_VERTEX = `#version 300 es
precision highp float;
${PLACE}
layout(location = 0) in uint aNode;
void main() {
  gl_Position = onScreen(placeOf(int(aNode)));
}`;

export const EDGE_FRAGMENT = `#version 300 es
precision mediump float;
uniform vec4 uColor;
out vec4 color;
void main() {
  color = uColor;
}`;

/** aLook: layer, tiers, emphasis (0 dimmed, 1 as usual, 2 lit), importance in hundredths. */
export const NODE_VERTEX = `#version 300 es
precision highp float;
${PLACE}
uniform vec3 uLayers[11];
uniform vec3 uWarm;
uniform vec3 uCold;
uniform float uSize;
layout(location = 0) in uvec4 aLook;
flat out vec3 vFill;
flat out vec3 vRing;
flat out vec4 vShape;
void main() {
  gl_Position = onScreen(placeOf(gl_VertexID));
  float weight = float(aLook.w) / 100.0;
  float size = uSize * (0.55 + 0.9 * weight) * (aLook.z == 2u ? 1.35 : 1.0);
  bool pool = (aLook.y & 1u) != 0u;
  bool warm = (aLook.y & 2u) != 0u;
  bool cold = (aLook.y & 4u) != 0u;
  vFill = uLayers[aLook.x];
  vRing = warm ? uWarm : uCold;
  float ring = (warm || cold) && size > 3.0 ? 1.0 : 0.0;
  gl_PointSize = max(1.0, size * (1.0 + 0.5 * ring));
  vShape = vec4(ring, pool ? 1.0 : (warm || cold ? 0.45 : 0.22), aLook.z == 0u ? 0.12 : 1.0, gl_PointSize);
}`;

/** A disc of the layer's colour, fainter where the pool does not hold it, in a ring of the tier's. */
export const NODE_FRAGMENT = `#version 300 es
precision mediump float;
flat in vec3 vFill;
flat in vec3 vRing;
flat in vec4 vShape;
out vec4 color;
void main() {
  float far = length(gl_PointCoord - 0.5) * 2.0;
  float soft = 2.0 / vShape.w;
  float edge = vShape.x > 0.5 ? 0.66 : 1.0;
  float disc = 1.0 - smoothstep(edge - soft, edge, far);
  float outer = 1.0 - smoothstep(1.0 - soft, 1.0, far);
  float ring = vShape.x * outer * smoothstep(0.78 - soft, 0.78, far);
  float alpha = max(disc * vShape.y, ring) * vShape.z;
  if (vShape.w < 2.5) alpha = vShape.y * vShape.z;
  if (alpha < 0.01) discard;
  color = vec4(mix(vFill, vRing, ring) * alpha, alpha);
}`;

/** A picture that was taken before, in a rectangle: left, bottom, right and top of the clip space. */
export const PICTURE_VERTEX = `#version 300 es
precision highp float;
uniform vec4 uPlace;
out vec2 vAt;
void main() {
  vAt = vec2(gl_VertexID & 1, gl_VertexID >> 1);
  gl_Position = vec4(mix(uPlace.xy, uPlace.zw, vAt), 0.0, 1.0);
}`;

export const PICTURE_FRAGMENT = `#version 300 es
precision mediump float;
uniform sampler2D uPicture;
in vec2 vAt;
out vec4 color;
void main() {
  color = texture(uPicture, vAt);
}`;
