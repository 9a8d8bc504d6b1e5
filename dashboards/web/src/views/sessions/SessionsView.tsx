import "./sessions.css";

import { TextInput } from "@mantine/core";
import { IconSearch } from "@tabler/icons-react";

import { useResource } from "../../api/resource";
import type { Sessions } from "../../api/types";
import { whole, words } from "../../format";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";
import { change, useRoute } from "../../route";
import { SessionTable } from "./SessionTable";
import { Timeline } from "./Timeline";

/** Who is here, and one of them over time. */
export function SessionsView() {
  const { params } = useRoute();
  const name = params.get("session");
  const search = params.get("q") ?? "";
  const of = search === "" ? "" : `&search=${encodeURIComponent(search)}`;
  const sessions = useResource<Sessions>(`v1/sessions?limit=200${of}`, 2000);
  return (
    <div className="stack">
      {name !== null && <Timeline session={name} tenant={params.get("tenant")} />}
      <Panel title="Sessions" note={sessions.data && <Counts data={sessions.data} />}>
        <TextInput
          mb="sm"
          aria-label="Search sessions"
          placeholder="A part of a session's name"
          leftSection={<IconSearch size={15} />}
          value={search}
          onChange={(event) => change({ q: event.currentTarget.value })}
        />
        <Await of={sessions}>
          {(data) =>
            data.sessions.length === 0 ? (
              <Empty title={search === "" ? "No session yet" : "No session is called that"}>
                Sessions are named by <code>session_id</code> in a request, or told from prompts
                that extend each other.
              </Empty>
            ) : (
              <SessionTable sessions={data.sessions} selected={name} />
            )
          }
        </Await>
      </Panel>
    </div>
  );
}

function Counts({ data }: { data: Sessions }) {
  const states = Object.entries(data.states).filter(([, count]) => count > 0);
  return (
    <>
      {whole(data.known)} known{states.length > 0 && ": "}
      {states.map(([state, count]) => `${whole(count)} ${words(state)}`).join(", ")}
    </>
  );
}
