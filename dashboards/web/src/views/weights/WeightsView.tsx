import "./weights.css";

import { Alert, Button, Group, Radio } from "@mantine/core";
import { IconInfoCircle } from "@tabler/icons-react";
import { useState } from "react";

import { ApiError, send } from "../../api/client";
import { editToken } from "../../api/editToken";
import { useResource } from "../../api/resource";
import type { WeightChange, Weights } from "../../api/types";
import { Facts } from "../../parts/Facts";
import { Panel } from "../../parts/Panel";
import { Await } from "../../parts/states";
import { changeOf, type Draft, UNTOUCHED } from "./draft";
import { EffectPanel } from "./EffectPanel";
import { LayerList } from "./LayerList";
import { useEffectOf } from "./useEffectOf";
import { WeightTable } from "./WeightTable";

const TRIED =
  "A shadow has these weights from now on, and nothing else has: What if shows what it finds of " +
  "your traffic, as “other weights”.";

/** What came of a change: that it was made, or why not. */
interface Outcome {
  readonly title: string;
  readonly text: string;
}

/** What decides the ranking: seen, tried, changed and taken back. */
export function WeightsView() {
  const weights = useResource<Weights>("v1/weights", 2000);
  return <Await of={weights}>{(data) => <Screen weights={data} />}</Await>;
}

function Screen({ weights }: { weights: Weights }) {
  const [draft, setDraft] = useState<Draft>(UNTOUCHED);
  const [done, setDone] = useState<Outcome | null>(null);
  const [isBusy, setBusy] = useState(false);
  const change = changeOf(draft, weights);
  const effect = useEffectOf(change);
  const act = (method: "PUT" | "POST", path: string, body: unknown, said: string) => {
    setBusy(true);
    send<unknown>(method, path, body)
      .then(() => {
        setDone({ title: "Weights", text: said });
        setDraft(UNTOUCHED);
      })
      .catch((error: unknown) => setDone({ title: "Not changed", text: reasonOf(error) }))
      .finally(() => setBusy(false));
  };
  return (
    <div className="stack">
      {weights.why_not !== null && (
        <Note title="Changes can be tried here, but not kept">{weights.why_not}</Note>
      )}
      <div className="outcome">
        {done !== null && <Note title={done.title}>{done.text}</Note>}
        {change !== null && (
          <EffectPanel
            effect={effect}
            isBusy={isBusy}
            isKept={weights.is_editable}
            onApply={() =>
              act(
                "PUT",
                "v1/weights",
                change,
                `Written to ${weights.file}; ${whenInForce(change)}.`,
              )
            }
            onTry={() => act("POST", "v1/weights/trial", change, TRIED)}
            onForget={() => setDraft(UNTOUCHED)}
          />
        )}
      </div>
      <Fields weights={weights} draft={draft} onDraft={setDraft} />
      {weights.undoable > 0 && (
        <p className="acts">
          <Button
            variant="default"
            disabled={isBusy || editToken() === null}
            onClick={() => act("POST", "v1/weights/undo", {}, "The last change was taken back.")}
          >
            Take the last change back
          </Button>
          <span className="dim">{weights.undoable} since the sidecar started</span>
        </p>
      )}
    </div>
  );
}

function reasonOf(error: unknown): string {
  return error instanceof ApiError ? error.message : String(error);
}

function Note(props: { title: string; children: string }) {
  return (
    <Alert
      className="notice"
      variant="default"
      icon={<IconInfoCircle size={18} />}
      title={props.title}
    >
      <span className="wrap">{props.children}</span>
    </Alert>
  );
}

function Fields(props: { weights: Weights; draft: Draft; onDraft: (draft: Draft) => void }) {
  const { weights, draft, onDraft } = props;
  return (
    <div className="split even">
      <PolicyPanel
        weights={weights}
        chosen={draft.policy ?? weights.next_policy}
        onChoose={(policy) => onDraft({ ...draft, policy })}
      />
      <Panel title="Protected layers" note="from most to least precious">
        <LayerList
          layers={weights.layers}
          held={draft.layers ?? weights.protected_layers}
          onChange={(layers) => onDraft({ ...draft, layers })}
        />
      </Panel>
      <Panel title="Weights of a score" note="[score]; below zero keeps a block">
        <WeightTable
          values={weights.score}
          defaults={weights.defaults}
          meanings={weights.meanings}
          touched={draft.score}
          onChange={(score) => onDraft({ ...draft, score })}
        />
      </Panel>
      <Panel title="What an edge counts" note="[score.edge_types]">
        <WeightTable
          values={weights.edge_types}
          defaults={weights.edge_type_defaults}
          meanings={weights.meanings}
          touched={draft.edgeTypes}
          onChange={(edgeTypes) => onDraft({ ...draft, edgeTypes })}
        />
      </Panel>
    </div>
  );
}

/** A policy ranks from the start of the sidecar on: it would have to learn anew. */
function whenInForce(change: WeightChange): string {
  const { policy, ...rest } = change;
  const isAlone = Object.values(rest).every((part) => part == null || isNothing(part));
  if (policy == null) return "in force within a second";
  const later = `the policy ${policy} ranks from the sidecar's next start on`;
  return isAlone ? later : `in force within a second, ${later}`;
}

function isNothing(part: object): boolean {
  return !Array.isArray(part) && Object.keys(part).length === 0;
}

function PolicyPanel(props: {
  weights: Weights;
  chosen: string;
  onChoose: (policy: string) => void;
}) {
  const { weights, chosen, onChoose } = props;
  return (
    <Panel title="Policy" note="takes effect when the sidecar starts">
      <div className="stack">
        <Radio.Group aria-label="Policy" value={chosen} onChange={onChoose}>
          <Group gap="md">
            {weights.policies.map((policy) => (
              <Radio key={policy} value={policy} label={policy} />
            ))}
          </Group>
        </Radio.Group>
        <Facts
          of={{
            "in force": weights.policy,
            guard: weights.guard
              ? "on: LRU ranks until the policy has found more than LRU would"
              : "off: the policy ranks from the start",
            heeds: weights.heeds,
            file: weights.file,
          }}
        />
      </div>
    </Panel>
  );
}
