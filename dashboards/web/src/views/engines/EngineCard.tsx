import { useNews } from "../../api/heartbeat";
import type { EngineView } from "../../api/types";
import { counted, duration, percent, whole } from "../../format";
import { Facts } from "../../parts/Facts";
import { Figure } from "../../parts/Figure";
import { Holds } from "./Holds";
import { type EngineStatus, statusOf } from "./status";
import { Tiers } from "./Tiers";

const TONES: Record<string, string> = { synced: "good", partial: "warn", degraded: "bad" };

/** One engine: how it is in a sentence, and then in numbers. */
export function EngineCard({ engine }: { engine: EngineView }) {
  const status = statusOf(engine);
  const stale = useNews()?.now.stale_s;
  return (
    <section className="panel engine" aria-label={`Engine ${engine.name}`}>
      <div className="name">
        <h2 className="wrap">{engine.name}</h2>
        <span
          className="condition"
          style={{ ["--tone" as string]: `var(--${TONES[engine.state] ?? "loaded"})` }}
        >
          {engine.state}
        </span>
        <p className="wrap">{engine.summary}</p>
      </div>
      <dl className="figures">
        <Figure label="Ranked by" value={engine.ranked_by} note={engine.guard} />
        <Figure
          label="Advice age"
          value={duration(engine.ranking_age_s)}
          {...(stale !== undefined && { note: `stale after ${duration(stale)}` })}
        />
        <Figure
          label="Prompt tokens found"
          value={percent(engine.hit_share, 1, 1)}
          note="since the start"
        />
        <Figure
          label="Events lost"
          value={whole(engine.dropped)}
          note={`${counted(engine.gaps, "gap")}, ${counted(engine.resyncs, "resync")}`}
          {...tone(engine)}
        />
        {engine.prefetch_useful !== null && (
          <Figure label="Prefetches used" value={percent(engine.prefetch_useful)} />
        )}
      </dl>
      <div className="tiles">
        <Facts of={factsOf(engine, status)} />
        {engine.admission && <Holds admission={engine.admission} />}
        {status.tiers && <Tiers tiers={status.tiers} />}
      </div>
    </section>
  );
}

function tone(engine: EngineView): { tone?: string } {
  return engine.dropped || engine.gaps ? { tone: "warn" } : {};
}

function factsOf(engine: EngineView, { graph, silent_s }: EngineStatus) {
  const pressure = graph?.pressure;
  return {
    model: engine.model,
    version: engine.version,
    "connected by": engine.kind === "hook" ? "the hook: takes advice" : "KV events: watched only",
    "last heard of": `${duration(silent_s)} ago`,
    "in its pool": graph && counted(graph.resident, "block"),
    "kept whatever scores say": graph?.protection.replace(/^protected: /, ""),
    pool: pressure && `${whole(pressure.total_blocks)} blocks`,
    requests: pressure && `${pressure.running} running, ${pressure.waiting} waiting`,
    "advice applied": graph?.applied && `${counted(graph.applied.moved, "block")} moved`,
  };
}
