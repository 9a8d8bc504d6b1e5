import "./weights.css";

import { Alert } from "@mantine/core";
import { IconInfoCircle } from "@tabler/icons-react";

import { useResource } from "../../api/resource";
import type { Weights } from "../../api/types";
import { words } from "../../format";
import { Facts } from "../../parts/Facts";
import { Panel } from "../../parts/Panel";
import { Await } from "../../parts/states";
import { WeightTable } from "./WeightTable";

/** What decides the ranking, as it is configured. */
export function WeightsView() {
  const weights = useResource<Weights>("v1/weights", 3000);
  return <Await of={weights}>{(data) => <Screen weights={data} />}</Await>;
}

function Screen({ weights }: { weights: Weights }) {
  return (
    <div className="stack">
      {weights.why_not !== null && (
        <Alert variant="light" color="blue" icon={<IconInfoCircle size={18} />} title="These are shown, not edited, here">
          <span className="wrap">{weights.why_not}</span>
        </Alert>
      )}
      <div className="split even">
        <Panel title="Policy">
          <div className="stack">
            <ul className="policies">
              {weights.policies.map((policy) => (
                <li key={policy} data-current={policy === weights.policy}>
                  {policy}
                  {policy === weights.policy && <span className="dim">ranks</span>}
                </li>
              ))}
            </ul>
            <Facts
              of={{
                guard: weights.guard ? "on: LRU ranks until the policy has found more than it" : "off: the policy ranks from the start",
                file: weights.file,
              }}
            />
          </div>
        </Panel>
        <Panel title="Layers" note="from most to least precious">
          <ol className="layers">
            {weights.layers.map((layer) => (
              <li key={layer}>
                <span className="key">
                  <i style={{ background: `var(--${layer})` }} />
                  {words(layer)}
                </span>
                {weights.protected_layers.includes(layer) && <span className="dim">protected</span>}
              </li>
            ))}
          </ol>
        </Panel>
        <Panel title="Weights of a score" note="[score]">
          <WeightTable values={weights.score} defaults={weights.defaults} />
        </Panel>
        <Panel title="What an edge counts" note="[score.edge_types]">
          <WeightTable values={weights.edge_types} defaults={weights.edge_type_defaults} />
        </Panel>
      </div>
    </div>
  );
}
