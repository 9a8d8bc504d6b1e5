import { useEngineNames } from "../../api/engineNames";
import type { TierFill } from "../../api/types";
import { bytes, percent, whole } from "../../format";
import { Bar } from "../../parts/Bar";
import { Panel } from "../../parts/Panel";

/** How full the tiers below the pools are. */
export function TierPanel({ tiers }: { tiers: readonly TierFill[] }) {
  const nameOf = useEngineNames();
  return (
    <Panel title="Tiers" note="of one worker each">
      <div className="pool">
        {tiers.map((tier) => (
          <div className="sliced" key={`${tier.engine} ${tier.tier}`}>
            <h3>
              {tier.tier} of {nameOf(tier.engine)}
            </h3>
            <Bar
              label={`${tier.tier} of ${nameOf(tier.engine)}`}
              slices={[{ label: "blocks", value: tier.blocks, color: tier.tier }]}
              room={Math.max(0, tier.capacity - tier.blocks)}
            />
            <p className="dim">
              {whole(tier.blocks)} of {whole(tier.capacity)} blocks,{" "}
              {percent(tier.blocks, tier.capacity)}, {bytes(tier.bytes)}
            </p>
          </div>
        ))}
      </div>
    </Panel>
  );
}
