import { bytes, counted, duration, percent, whole } from "../../format";
import { Bar } from "../../parts/Bar";
import { Facts } from "../../parts/Facts";
import type { TierReport } from "./status";

/** What an engine's tiers hold, what moved between them, and what came of it. */
export function Tiers({ tiers }: { tiers: TierReport }) {
  const size = tiers.bytes_per_block;
  const judged = tiers.prefetch_useful + tiers.prefetch_wasted;
  return (
    <div className="pool">
      <Fill tier="warm" blocks={tiers.warm_blocks} capacity={tiers.warm_capacity} size={size} />
      {tiers.cold_capacity > 0 && (
        <Fill tier="cold" blocks={tiers.cold_blocks} capacity={tiers.cold_capacity} size={size} />
      )}
      <Facts
        of={{
          spilled: `${counted(tiers.spilled, "block")}${speed(tiers.spill_bytes_per_s)}; ${whole(tiers.passed_over)} more were not worth a copy`,
          "brought back": `${whole(tiers.loaded)} on demand${speed(tiers.load_bytes_per_s)}; ${whole(tiers.load_failed)} failed`,
          prefetched: `${whole(tiers.prefetched)} ahead of demand, ${percent(tiers.prefetch_useful, judged)} of them used; ${whole(tiers.prefetch_cancelled)} not begun for want of room`,
          "moved to disk": tiers.cold_capacity > 0 ? `${whole(tiers.demoted)} copies` : null,
          "given up": `${whole(tiers.dropped)} copies, for want of room`,
          stalls: `${counted(tiers.stalls, "request")} waited ${duration(tiers.stall_s)}`,
          "computed instead": `${whole(tiers.recomputed)}: judged faster than a load`,
          "shared store": tiers.reads_store
            ? `${whole(tiers.shared)} given, ${whole(tiers.share_failed)} failed; ${whole(tiers.store_loaded)} loaded, ${whole(tiers.store_failed)} not given whole`
            : null,
          "without a copy": `${whole(tiers.spill_lost)} lost before, ${whole(tiers.spill_failed)} failed`,
        }}
      />
    </div>
  );
}

/** What follows on what was moved; nothing was measured yet at 0. */
function speed(bytesPerS: number): string {
  return bytesPerS > 0 ? `, at ${bytes(bytesPerS)}/s` : "";
}

function Fill(props: { tier: string; blocks: number; capacity: number; size: number }) {
  const { tier, blocks, capacity, size } = props;
  return (
    <div className="sliced">
      <h3>
        {tier}: {whole(blocks)} of {whole(capacity)} blocks, {bytes(blocks * size)} of{" "}
        {bytes(capacity * size)}
      </h3>
      <Bar
        label={tier}
        slices={[{ label: "blocks", value: blocks, color: tier }]}
        room={Math.max(0, capacity - blocks)}
      />
    </div>
  );
}
