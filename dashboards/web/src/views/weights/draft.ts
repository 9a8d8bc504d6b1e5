import type { WeightChange, Weights } from "../../api/types";

/** What somebody changed and has not applied; null where nothing is. */
export function changeOf(draft: Draft, weights: Weights): WeightChange | null {
  const score = differing(draft.score, weights.score);
  const edge_types = differing(draft.edgeTypes, weights.edge_types);
  const layers =
    draft.layers === null || same(draft.layers, weights.protected_layers) ? null : draft.layers;
  const policy = draft.policy === weights.next_policy ? null : draft.policy;
  const isEmpty =
    layers === null &&
    policy === null &&
    [score, edge_types].every((part) => Object.keys(part).length === 0);
  return isEmpty ? null : { score, edge_types, protected_layers: layers, policy };
}

/** Values that stand in the fields, where they were touched. */
export interface Draft {
  readonly score: Record<string, number>;
  readonly edgeTypes: Record<string, number>;
  readonly layers: string[] | null;
  readonly policy: string | null;
}

export const UNTOUCHED: Draft = { score: {}, edgeTypes: {}, layers: null, policy: null };

function differing(touched: Record<string, number>, now: Record<string, number>) {
  return Object.fromEntries(Object.entries(touched).filter(([name, value]) => now[name] !== value));
}

function same(one: readonly string[], other: readonly string[]): boolean {
  return one.length === other.length && one.every((each) => other.includes(each));
}
