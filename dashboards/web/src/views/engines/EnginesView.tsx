import "../now/now.css";
import "./engines.css";

import { useResource } from "../../api/resource";
import type { Engines } from "../../api/types";
import { duration } from "../../format";
import { Facts } from "../../parts/Facts";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";
import { Counters } from "./Counters";
import { EngineCard } from "./EngineCard";

/** Health, gaps, drops and traffic of every engine, and of the sidecar itself. */
export function EnginesView() {
  const engines = useResource<Engines>("v1/engines", 1000);
  return <Await of={engines}>{(data) => <Screen engines={data} />}</Await>;
}

function Screen({ engines }: { engines: Engines }) {
  return (
    <div className="stack">
      {engines.engines.length === 0 && (
        <Panel title="Engines">
          <Empty title="No engine is connected">
            Start one with <code>AITHER_KVCACHE_GRAPH=1</code> and{" "}
            <code className="wrap">AITHER_KVCACHE_SIDECAR={engines.endpoint}</code>.
          </Empty>
        </Panel>
      )}
      {engines.engines.map((engine) => (
        <EngineCard key={engine.id} engine={engine} />
      ))}
      <div className="counters">
        <Panel title="Sidecar">
          <Facts
            of={{
              version: engines.version,
              "running for": duration(engines.uptime_s),
              endpoint: engines.endpoint,
            }}
          />
        </Panel>
        <Counters counters={engines.counters} />
      </div>
    </div>
  );
}
