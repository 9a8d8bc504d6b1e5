import { Button, SegmentedControl, TextInput } from "@mantine/core";
import { IconSearch } from "@tabler/icons-react";
import { useState } from "react";

import type { Resource } from "../../api/resource";
import type { Requests, RequestView } from "../../api/types";
import { clock, counted, whole, words } from "../../format";
import { Legend } from "../../parts/Legend";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";
import { change, useRoute } from "../../route";
import { RequestRow } from "./RequestRow";
import { partsOf } from "./parts";

const [FIRST, PAGE] = [12, 40]; // rows at first, and with each "Show more"

interface Props {
  readonly asked: Resource<Requests>;
  readonly session: string | null;
  /** The one that the address names, where it is none of these. */
  readonly older: RequestView | undefined;
}

/**
 * Recent requests, the newest or the slowest first; the one that the address names is open. What is
 * typed is typed into one field, while the answers to each of its letters come and go.
 */
export function RequestList({ asked, session, older }: Props) {
  const { params } = useRoute();
  const reason = params.get("reason");
  const order = params.get("order") ?? "newest";
  const { data } = asked;
  return (
    <Panel title="Recent requests" note={data && noteOf(data, order)}>
      <div className="find">
        <TextInput
          aria-label="Search requests"
          placeholder="A part of a request's id, session or tenant"
          leftSection={<IconSearch size={15} />}
          value={params.get("find") ?? ""}
          onChange={(event) => change({ find: event.currentTarget.value })}
        />
        <SegmentedControl
          size="xs"
          aria-label="Order of requests"
          data={["newest", "slowest"]}
          value={order}
          onChange={(next) => change({ order: next === "newest" ? null : next })}
        />
        <Legend entries={partsOf(data?.requests ?? [])} />
      </div>
      {(session !== null || reason !== null) && (
        <p className="filters">
          {session !== null && (
            <Chip label={`of ${session}`} onClear={() => change({ session: null })} />
          )}
          {reason !== null && (
            <Chip label={words(reason)} onClear={() => change({ reason: null })} />
          )}
        </p>
      )}
      <Await of={asked}>{({ requests }) => <Found requests={requests} older={older} />}</Await>
    </Panel>
  );
}

interface FoundProps {
  readonly requests: readonly RequestView[];
  readonly older: RequestView | undefined;
}

/** The rows: a dozen at first. */
function Found({ requests, older }: FoundProps) {
  const { params } = useRoute();
  const [shown, show] = useState(FIRST);
  const open = params.get("request");
  const isOfSlowest = params.get("order") === "slowest";
  const place = requests.findIndex((each) => String(each.id) === open);
  const named = older === undefined ? [] : [older];
  const widest = Math.max(1, ...[...named, ...requests].map((each) => each.blocks.asked));
  const row = (each: RequestView) => (
    <RequestRow
      key={each.id}
      request={each}
      widest={widest}
      isOpen={String(each.id) === open}
      isOfSlowest={isOfSlowest}
    />
  );
  return (
    <>
      {open !== null && place < 0 && older === undefined && (
        <p className="dim">Request {open} is no longer in the log.</p>
      )}
      {older !== undefined && <ol className="requests">{row(older)}</ol>}
      {requests.length === 0 ? (
        <Empty title="No such request in the log">
          {params.get("find") || params.has("reason")
            ? "Take the filters away to see the others."
            : "As soon as an engine schedules one, it is here."}
        </Empty>
      ) : (
        <>
          <div className="columns" aria-hidden="true">
            {[
              "arrived",
              "session",
              "its prompt, in blocks",
              "found",
              "took",
              isOfSlowest ? "most of it in" : "why it missed",
            ].map((name) => (
              <span key={name}>{name}</span>
            ))}
          </div>
          <ol className="requests">{requests.slice(0, Math.max(shown, place + 1)).map(row)}</ol>
        </>
      )}
      {requests.length > shown && (
        <Button variant="default" size="xs" onClick={() => show(shown + PAGE)}>
          Show more
        </Button>
      )}
    </>
  );
}

/** How many of all these are. */
function noteOf({ requests, next, since }: Requests, order: string): string {
  const reach = since === null ? "" : `, which goes back to ${clock(since)}`;
  if (order === "slowest")
    return `the ${counted(requests.length, "request")} of the log that took longest${reach}`;
  return next === null
    ? `${counted(requests.length, "request")}: all that the log has of these${reach}`
    : `the newest ${whole(requests.length)} of the log${reach}`;
}

function Chip(props: { label: string; onClear: () => void }) {
  return (
    <button type="button" className="chip" onClick={props.onClear} title="Take this filter away">
      {props.label} ×
    </button>
  );
}
