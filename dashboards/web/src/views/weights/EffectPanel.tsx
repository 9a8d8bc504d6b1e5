import { Button } from "@mantine/core";

import { editToken } from "../../api/editToken";
import type { Resource } from "../../api/resource";
import type { WeightEffect } from "../../api/types";
import { BlockLink, SessionLink } from "../../parts/links";
import { Panel } from "../../parts/Panel";
import { Await } from "../../parts/states";
import { LayerKey } from "../../parts/LayerKey";
import { right, Rows } from "../../parts/Rows";

interface Props {
  readonly effect: Resource<WeightEffect>;
  readonly isBusy: boolean;
  readonly isKept: boolean;
  readonly onApply: () => void;
  readonly onTry: () => void;
  readonly onForget: () => void;
}

/** What the change in the fields would do, before it is made. */
export function EffectPanel({ effect, isBusy, isKept, onApply, onTry, onForget }: Props) {
  const mayEdit = editToken() !== null;
  const isReady = mayEdit && !isBusy && effect.data !== undefined && effect.error === undefined;
  return (
    <Panel title="What this change would do">
      <Await of={effect}>{(data) => <Effect effect={data} />}</Await>
      <p className="acts">
        <Button onClick={onApply} disabled={!isReady || !isKept}>
          Apply
        </Button>
        <Button variant="default" onClick={onTry} disabled={!isReady}>
          Try in a shadow
        </Button>
        <Button variant="default" onClick={onForget}>
          Leave it as it is
        </Button>
        {!mayEdit && (
          <span className="dim">
            Changes need the edit token: open the page with <code>kvgraph open --edit</code>.
          </span>
        )}
      </p>
    </Panel>
  );
}

function Effect({ effect }: { effect: WeightEffect }) {
  return (
    <>
      <p className="lead wrap">{effect.sentence}</p>
      {effect.window && <p className="wrap">{effect.window.sentence}</p>}
      {effect.movers.length > 0 && (
        <Rows columns={["block", "layer", "session", right("place now"), right("then")]}>
          {effect.movers.map((mover) => (
            <tr key={mover.key}>
              <td>
                <BlockLink of={mover.key} />
              </td>
              <td>
                <LayerKey of={mover.layer} />
              </td>
              <td>{mover.session !== null && <SessionLink of={mover.session} />}</td>
              <td className="right">{placed(mover.now)}</td>
              <td className="right">{placed(mover.then)}</td>
            </tr>
          ))}
        </Rows>
      )}
    </>
  );
}

function placed(place: number | null): string {
  return place === null ? "later" : String(place + 1);
}
