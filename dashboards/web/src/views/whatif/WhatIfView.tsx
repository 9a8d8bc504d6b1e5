import "./whatif.css";

import { Button } from "@mantine/core";
import { useState } from "react";

import { send } from "../../api/client";
import { editToken } from "../../api/editToken";
import { useResource } from "../../api/resource";
import type { Shadows } from "../../api/types";
import { counted } from "../../format";
import { EnginePicker } from "../../parts/EnginePicker";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";
import { useRoute } from "../../route";
import { CapacityChart } from "./CapacityChart";
import { ShadowHistory } from "./ShadowHistory";
import { OTHERWISE, OURS } from "./looks";
import { ShadowTable } from "./ShadowTable";

/** What other policies and other pool sizes would have found of the same requests. */
export function WhatIfView() {
  const { params } = useRoute();
  const engine = params.get("engine");
  const of = engine === null ? "" : `?engine=${encodeURIComponent(engine)}`;
  const shadows = useResource<Shadows>(`v1/shadows${of}`, 3000);
  return <Await of={shadows}>{(data) => <Screen data={data} />}</Await>;
}

function Screen({ data }: { data: Shadows }) {
  const asked = data.shadows.some((each) => each.asked > 0);
  if (!asked) {
    return (
      <Empty title="No shadow has followed a session yet">Shadows fill as requests come.</Empty>
    );
  }
  const followed = followedBy(data);
  return (
    <div className="stack">
      {data.guard !== null && <p className="lead wrap">{data.guard}</p>}
      <div className="split even">
        <Panel
          title="Found over time, in a pool as large"
          note={<EnginePicker engines={data.engines} value={data.engine} />}
        >
          <ShadowHistory data={data} />
        </Panel>
        <Panel title="Found over the pool's size" note={followed}>
          <div className="stack">
            <CapacityChart shadows={data.shadows} />
            <p className="dim">
              What more memory would find of the same requests: go by this when buying. The ceiling
              (belady) holds for today's size alone; a larger pool can find more than it.
            </p>
          </div>
        </Panel>
      </div>
      <Panel title="Every shadow" note={followed}>
        <ShadowTable shadows={data.shadows} />
        <OwnError shadows={data.shadows} />
        {data.shadows.some(({ name }) => name === OTHERWISE) && <EndTrial />}
      </Panel>
    </div>
  );
}

const LITTLE = 0.005; // of what is asked for: such a difference needs no words; chosen

/** By how much the shadow of what runs here differs from what runs: others are no more exact. */
function OwnError({ shadows }: Pick<Shadows, "shadows">) {
  const ours = shadows.find(({ name }) => name === OURS);
  const same = shadows.find(
    ({ name, policy, capacity, tiers }) =>
      name !== OURS && policy === ours?.policy && capacity === 1 && !tiers,
  );
  if (same?.hit_rate == null || same.ours === null) return null;
  const off = Math.abs(same.hit_rate - same.ours);
  if (off < LITTLE) return null;
  return (
    <p className="dim wrap">
      The shadow of the policy and size that run here is off by {(100 * off).toFixed(1)} points:
      take smaller differences for noise.
    </p>
  );
}

function EndTrial() {
  const [isEnded, setEnded] = useState(false);
  const end = () => {
    send("DELETE", "v1/weights/trial", {}).then(
      () => setEnded(true),
      () => setEnded(false),
    );
  };
  return (
    <p className="acts">
      <Button variant="default" disabled={isEnded || editToken() === null} onClick={end}>
        End the shadow of other weights
      </Button>
    </p>
  );
}

/** Whom shadows follow, and how often they are ranked where that takes long. */
function followedBy({ sessions, ranked_every_s }: Shadows): string {
  const often = ranked_every_s > 1 ? `, ranked every ${ranked_every_s} s` : "";
  return `${counted(sessions, "session")} followed${often}`;
}
