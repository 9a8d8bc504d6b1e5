import { Button } from "@mantine/core";
import { useState } from "react";

import type { RequestView } from "../../api/types";
import { words } from "../../format";
import { Legend } from "../../parts/Legend";
import { Panel } from "../../parts/Panel";
import { Empty } from "../../parts/states";
import { change, useRoute } from "../../route";
import { RequestRow } from "./RequestRow";
import { partsOf } from "./parts";

const PAGE = 40;

interface Props {
  readonly requests: readonly RequestView[];
  readonly session: string | null;
}

/** Recent requests, the newest first; the one that the address names is open. */
export function RequestList({ requests, session }: Props) {
  const { params } = useRoute();
  const [shown, show] = useState(PAGE);
  const reason = params.get("reason");
  const open = params.get("request");
  const fitting = requests.filter((each) => reason === null || each.miss?.reason === reason);
  const place = fitting.findIndex((each) => String(each.id) === open);
  const widest = Math.max(1, ...fitting.map((each) => each.blocks.asked));
  return (
    <Panel title="Recent requests" note={<Legend entries={partsOf(requests)} />}>
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
      {open !== null && place < 0 && <p className="dim">Request {open} is no longer in the log.</p>}
      {fitting.length === 0 ? (
        <Empty title="No such request in the log">
          {requests.length === 0
            ? "As soon as an engine schedules one, it is here."
            : "Take the filter away to see the others."}
        </Empty>
      ) : (
        <ol className="requests">
          {fitting.slice(0, Math.max(shown, place + 1)).map((each) => (
            <RequestRow
              key={each.id}
              request={each}
              widest={widest}
              isOpen={String(each.id) === open}
            />
          ))}
        </ol>
      )}
      {fitting.length > shown && (
        <Button variant="default" size="xs" onClick={() => show(shown + PAGE)}>
          Show more
        </Button>
      )}
    </Panel>
  );
}

function Chip(props: { label: string; onClear: () => void }) {
  return (
    <button type="button" className="chip" onClick={props.onClear} title="Take this filter away">
      {props.label} ×
    </button>
  );
}
