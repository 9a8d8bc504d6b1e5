import { SegmentedControl, Switch, TextInput } from "@mantine/core";
import { IconSearch } from "@tabler/icons-react";

import { compact, words } from "../../format";
import { change } from "../../route";
import { found } from "./emphasis";
import { edgesOf, type GraphData, POOL } from "./GraphData";
import type { LayoutName } from "./layouts/shape";

const LAYOUTS: readonly { value: LayoutName; label: string }[] = [
  { value: "tree", label: "Prefix tree" },
  { value: "force", label: "Forces" },
  { value: "timeline", label: "Timeline" },
];

interface Props {
  readonly data: GraphData;
  readonly layout: LayoutName;
  readonly search: string;
  readonly hidden: ReadonlySet<string>;
  readonly asTable: boolean;
  readonly canDraw: boolean;
}

/** What is shown, how, and what the colours mean. */
export function GraphControls(props: Props) {
  const { data, layout, search, asTable, canDraw } = props;
  return (
    <aside className="controls" aria-label="What is shown">
      <TextInput
        aria-label="Search"
        placeholder="Session, name, key …"
        title="A part of a session, tenant, layer or key"
        leftSection={<IconSearch size={15} />}
        value={search}
        onChange={(event) => change({ q: event.currentTarget.value, block: null })}
        description={search && `${found(data, search).length.toLocaleString("en")} blocks`}
      />
      <SegmentedControl
        fullWidth
        size="xs"
        aria-label="Layout"
        data={[...LAYOUTS]}
        value={asTable ? "" : layout}
        disabled={!canDraw}
        onChange={(value) => change({ layout: value, as: null })}
      />
      <Switch
        size="sm"
        label="As a table"
        checked={asTable}
        disabled={!canDraw}
        onChange={(event) => change({ as: event.currentTarget.checked ? "table" : null })}
      />
      <Edges data={data} hidden={props.hidden} />
      <Layers data={data} search={search} />
      <Tiers />
    </aside>
  );
}

function Edges({ data, hidden }: { data: GraphData; hidden: ReadonlySet<string> }) {
  const types = data.names.types.filter((_, type) => edgesOf(data, type) > 0);
  const toggle = (type: string, on: boolean) => {
    const next = new Set(hidden);
    if (on) next.delete(type);
    else next.add(type);
    change({ hide: [...next].filter(Boolean).join(",") });
  };
  return (
    <fieldset>
      <legend>Edges</legend>
      {types.length === 0 && <p className="dim">None yet.</p>}
      {types.map((type) => (
        <Switch
          key={type}
          size="xs"
          checked={!hidden.has(type)}
          onChange={(event) => toggle(type, event.currentTarget.checked)}
          label={
            <span className="key">
              <i className="line" style={{ background: `var(--${type})` }} />
              {words(type)}
              <b>{compact(edgesOf(data, data.names.types.indexOf(type)))}</b>
            </span>
          }
        />
      ))}
    </fieldset>
  );
}

function Layers({ data, search }: { data: GraphData; search: string }) {
  const counts = new Array<number>(data.names.layers.length).fill(0);
  for (let node = 0; node < data.blocks; node++) {
    if (data.tiers[node]! & POOL) counts[data.layer[node]!]!++;
  }
  return (
    <fieldset>
      <legend>Source layers, in the pool</legend>
      {data.names.layers.map((name, layer) => (
        <button
          key={name}
          type="button"
          className="key"
          aria-pressed={search === words(name)}
          onClick={() => change({ q: search === words(name) ? null : words(name), block: null })}
        >
          <i style={{ background: `var(--${name})` }} />
          {words(name)}
          <b>{compact(counts[layer])}</b>
        </button>
      ))}
    </fieldset>
  );
}

function Tiers() {
  return (
    <fieldset>
      <legend>Tiers</legend>
      <span className="key">
        <i style={{ background: "var(--dim)" }} /> in the pool
      </span>
      <span className="key">
        <i className="ring" style={{ borderColor: "var(--warm)" }} /> copy in warm memory
      </span>
      <span className="key">
        <i className="ring" style={{ borderColor: "var(--cold)" }} /> copy on cold storage
      </span>
      <span className="key">
        <i style={{ background: "var(--dim)", opacity: 0.3 }} /> remembered only
      </span>
    </fieldset>
  );
}
