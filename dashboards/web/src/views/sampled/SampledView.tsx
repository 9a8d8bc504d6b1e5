import "./sampled.css";

import { useResource } from "../../api/resource";
import type { Sampled } from "../../api/types";
import { Await, Empty } from "../../parts/states";
import { LayerLooks } from "./LayerLooks";
import { LookedAt } from "./LookedAt";
import { SureOf } from "./SureOf";

/** What sampled decode steps told: where the model looks, and how sure it is of what it writes. */
export function SampledView() {
  const sampled = useResource<Sampled>("v1/sampled", 5000);
  return (
    <Await of={sampled}>
      {(data) =>
        isFed(data) ? (
          <div className="stack">
            <LayerLooks data={data} />
            <div className="sampled">
              <LookedAt blocks={data.blocks} />
              <SureOf data={data} />
            </div>
          </div>
        ) : (
          <Empty title="No engine samples">
            Start one with <code>AITHER_KVCACHE_SAMPLING=1</code>: it then tells of some decode
            steps which blocks the model attends to, and how sure it is of the next token.
          </Empty>
        )
      }
    </Await>
  );
}

/** Whether any sample has been told. */
export function isFed({ layers, sessions }: Sampled): boolean {
  return layers.length > 0 || sessions.length > 0;
}
