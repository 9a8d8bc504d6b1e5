import "./misses.css";

import { useNews, useRequests } from "../../api/heartbeat";
import { MOST_REQUESTS } from "../../api/limits";
import { type Resource, useResource } from "../../api/resource";
import type { Misses, Requests, RequestView } from "../../api/types";
import { Await } from "../../parts/states";
import { useRoute } from "../../route";
import { LossPanel } from "./LossPanel";
import { ReasonsPanel } from "./ReasonsPanel";
import { RequestList } from "./RequestList";

/** Why requests did not find more: each request with its first miss, and totals by reason. */
export function MissesView() {
  const { params } = useRoute();
  const session = params.get("session");
  const of = session === null ? "" : `&session=${encodeURIComponent(session)}`;
  const find = params.get("find") ?? "";
  const like = find === "" ? "" : `&search=${encodeURIComponent(find)}`;
  const misses = useResource<Misses>("v1/misses", 2000);
  const reason = params.get("reason");
  const why = reason === null ? "" : `&reason=${encodeURIComponent(reason)}`;
  const order = params.get("order") === "slowest" ? "&order=slowest" : "";
  const requests = useRecent(of + like + why + order);
  const older = useOlder(params.get("request"), requests.data);
  return (
    <div className="stack">
      <RequestList asked={requests} session={session} older={older} />
      <Await of={misses}>
        {(data) => (
          <div className="split">
            <ReasonsPanel misses={data} />
            <LossPanel loss={data.loss} />
          </div>
        )}
      </Await>
    </div>
  );
}

/** The newest requests: from the stream, unless it is away or only some of them are looked for. */
function useRecent(filter: string): Resource<Requests> {
  const isLive = useNews() !== null;
  const told = useRequests();
  const asks = filter !== "" || !isLive;
  const path = `v1/requests?limit=${MOST_REQUESTS}${filter}`;
  const asked = useResource<Requests>(asks ? path : null, 2000);
  const isNewer = told !== null && asked.data !== undefined && asked.data.at > told.at;
  return filter !== "" || told === null || isNewer ? asked : { data: told, error: undefined };
}

/** A request that the address names, where it is in the log, but none of those that are shown. */
function useOlder(named: string | null, shown: Requests | undefined): RequestView | undefined {
  const isShown = shown === undefined || shown.requests.some(({ id }) => String(id) === named);
  const id = Number(named);
  const asks = named !== null && !isShown && Number.isSafeInteger(id);
  const found = useResource<Requests>(asks ? `v1/requests?limit=1&before=${id + 1}` : null, 5000);
  return found.data?.requests.find((each) => each.id === id);
}
