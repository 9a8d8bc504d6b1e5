import "./now.css";

import { useNews } from "../../api/heartbeat";
import { useResource } from "../../api/resource";
import type { Now } from "../../api/types";
import { Await } from "../../parts/states";
import { AdvicePanel } from "./AdvicePanel";
import { Attention } from "./Attention";
import { HistoryPanel } from "./HistoryPanel";
import { PoolPanel } from "./PoolPanel";
import { RoomPanel } from "./RoomPanel";
import { Saved } from "./Saved";
import { TierPanel } from "./TierPanel";

/** One screen that answers whether it is helping. */
export function NowView() {
  const news = useNews();
  const asked = useResource<Now>(news === null ? "v1/now" : null, 2000);
  const now = news === null ? asked : { data: news.now, error: undefined };
  return <Await of={now}>{(data) => <Screen now={data} />}</Await>;
}

function Screen({ now }: { now: Now }) {
  return (
    <div className="stack">
      <Saved now={now} />
      <div className="split">
        <HistoryPanel history={now.history} />
        <div className="stack">
          <Attention notices={now.attention} />
          {now.rooms.length > 0 && <RoomPanel rooms={now.rooms} />}
          {now.advice.length > 0 && <AdvicePanel now={now} />}
        </div>
      </div>
      <div className="tiles">
        {now.pools.map((pool) => (
          <PoolPanel key={pool.engine} pool={pool} />
        ))}
        {now.tiers.length > 0 && <TierPanel tiers={now.tiers} />}
      </div>
    </div>
  );
}
