import type { PoolView } from "../../api/types";
import { compact, counted, percent, whole, words } from "../../format";
import { Bar, type Slice } from "../../parts/Bar";
import { Legend } from "../../parts/Legend";
import { Panel } from "../../parts/Panel";
import { STATES } from "./states";

/** What the pool of one engine holds: by source layer, and by what the sessions do. */
export function PoolPanel({ pool }: { pool: PoolView }) {
  const layers = Object.entries(pool.layers).map(([name, value]) => ({
    label: words(name),
    value,
    color: name,
  }));
  const states = STATES.map(({ name, color }) => ({
    label: words(name),
    value: pool.states[name] ?? 0,
    color,
  }));
  const free = pool.blocks === null ? 0 : Math.max(0, pool.blocks - pool.cached);
  return (
    <Panel title={`Pool of ${pool.name}`} note={fill(pool)}>
      <div className="pool">
        <Sliced title="by source layer" slices={layers} free={free} />
        <Sliced title="by what their session does" slices={states} free={free} />
        {pool.protection && <p className="dim">{pool.protection}</p>}
      </div>
    </Panel>
  );
}

function Sliced(props: { title: string; slices: readonly Slice[]; free: number }) {
  return (
    <div className="sliced">
      <h3>{props.title}</h3>
      <Bar label={props.title} slices={props.slices} room={props.free} />
      <Legend
        entries={props.slices
          .filter(({ value }) => value > 0)
          .map((slice) => ({ ...slice, value: compact(slice.value) }))}
      />
    </div>
  );
}

function fill({ cached, blocks }: PoolView): string {
  if (blocks === null) return `${counted(cached, "block")} cached`;
  return `${whole(cached)} of ${whole(blocks)} blocks, ${percent(cached, blocks)}`;
}
