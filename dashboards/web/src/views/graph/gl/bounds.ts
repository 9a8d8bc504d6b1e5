/** The smallest rectangle around places of the plane; left is beyond right where there are none. */
export interface Bounds {
  readonly left: number;
  readonly right: number;
  readonly low: number;
  readonly high: number;
}

export function boundsOf(positions: Float32Array): Bounds {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (let at = 0; at < positions.length; at += 2) {
    left = Math.min(left, positions[at]!);
    right = Math.max(right, positions[at]!);
    low = Math.min(low, positions[at + 1]!);
    high = Math.max(high, positions[at + 1]!);
  }
  return { left, right, low, high };
}
