import type { EngineView } from "../../api/types";

/** What the page reads of an engine's entry of `/status`; all of it may be missing. */
export interface EngineStatus {
  readonly silent_s?: number | null;
  readonly tiers?: TierReport | null;
  readonly graph?: {
    readonly resident: number;
    readonly protection: string;
    readonly pressure?: {
      readonly total_blocks: number;
      readonly running: number;
      readonly waiting: number;
    } | null;
    readonly applied?: { readonly moved: number } | null;
  } | null;
}

export interface TierReport {
  readonly bytes_per_block: number;
  readonly warm_blocks: number;
  readonly warm_capacity: number;
  readonly cold_blocks: number;
  readonly cold_capacity: number;
  readonly spilled: number;
  readonly spill_lost: number;
  readonly spill_failed: number;
  readonly passed_over: number;
  readonly demoted: number;
  readonly dropped: number;
  readonly loaded: number;
  readonly load_failed: number;
  readonly stalls: number;
  readonly stall_s: number;
  readonly recomputed: number;
  readonly prefetched: number;
  readonly prefetch_useful: number;
  readonly prefetch_wasted: number;
  readonly prefetch_cancelled: number;
  readonly spill_bytes_per_s: number;
  readonly load_bytes_per_s: number;
  readonly shared: number;
  readonly share_failed: number;
  readonly store_loaded: number;
  readonly store_failed: number;
  readonly reads_store: boolean;
}

export function statusOf(engine: EngineView): EngineStatus {
  return engine.status as EngineStatus;
}
