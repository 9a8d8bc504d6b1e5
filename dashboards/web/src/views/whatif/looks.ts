import type { ShadowView } from "../../api/types";

export const OURS = "ours";
export const CEILING = "belady";
export const OTHERWISE = "other weights";

const POLICIES = ["context", "capabilities", "axioms", "memories", "tool_result"];

/** A colour for each policy: ours, stock and the ceiling always have theirs. */
export function colorsOf(shadows: readonly ShadowView[]): Map<string, string> {
  const colors = new Map([
    ["lru", "shadow"],
    [CEILING, "warn"],
  ]);
  const ours = shadows.find((each) => each.name === OURS);
  if (ours !== undefined) colors.set(ours.policy, "accent");
  let next = 0;
  for (const { policy } of shadows) {
    if (!colors.has(policy)) colors.set(policy, POLICIES[next++ % POLICIES.length]!);
  }
  return colors;
}
