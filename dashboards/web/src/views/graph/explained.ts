import type { BlockView } from "../../api/types";

/** What the page reads of a block's `explain`. */
export interface Explained {
  readonly layer: string;
  readonly depth: number;
  readonly tokens: readonly [number, number];
  readonly importance: number;
  readonly hits: number;
  readonly requests: number;
  readonly tiers: Record<string, readonly string[]>;
  readonly session: string | null;
  readonly tenant: string | null;
  readonly model: string | null;
  readonly identity: string | null;
  readonly age_s: number;
  readonly policy: string;
  readonly who_ranks: string;
  readonly terms: Record<string, number>;
  readonly score: number;
  readonly standing: readonly string[];
  /** Engines in which more is protected than its share, so that this block is not. */
  readonly over_share_on: readonly string[];
  readonly copies: string;
  readonly parent: string | null;
  readonly ranks: Record<
    string,
    { readonly ranked_by: string; readonly rank: number; readonly of: number }
  >;
}

export function explainedOf(view: BlockView): Explained {
  return view.explain as unknown as Explained;
}
