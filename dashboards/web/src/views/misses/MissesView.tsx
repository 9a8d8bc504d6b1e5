import "./misses.css";

import { useResource } from "../../api/resource";
import type { Misses, Requests } from "../../api/types";
import { Await } from "../../parts/states";
import { useRoute } from "../../route";
import { LossPanel } from "./LossPanel";
import { ReasonsPanel } from "./ReasonsPanel";
import { RequestList } from "./RequestList";

const MOST = 200; // requests shown at once

/** Why requests did not find more: totals by reason, and each request with its first miss. */
export function MissesView() {
  const { params } = useRoute();
  const session = params.get("session");
  const of = session === null ? "" : `&session=${encodeURIComponent(session)}`;
  const misses = useResource<Misses>("v1/misses", 2000);
  const requests = useResource<Requests>(`v1/requests?limit=${MOST}${of}`, 1000);
  return (
    <div className="stack">
      <Await of={misses}>
        {(data) => (
          <div className="split">
            <ReasonsPanel misses={data} />
            <LossPanel loss={data.loss} />
          </div>
        )}
      </Await>
      <Await of={requests}>
        {(data) => <RequestList requests={data.requests} session={session} />}
      </Await>
    </div>
  );
}
