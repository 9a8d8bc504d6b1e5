import type { SessionView } from "../../api/types";
import { compact, duration, percent, UNKNOWN, words } from "../../format";
import { Bar } from "../../parts/Bar";
import { change } from "../../route";
import { Rows, Scroll } from "../../parts/Rows";

/** Sessions, those heard of last first. */
export function SessionTable(props: { sessions: readonly SessionView[]; selected: string | null }) {
  const most = Math.max(1, ...props.sessions.map(({ blocks }) => blocks));
  return (
    <Scroll label="Sessions" className="sessions">
      <Rows
        columns={[
          "session",
          "state",
          { name: "turns", className: "right wide" },
          { name: "tokens", className: "right wide" },
          { name: "holds: pool, warm, cold", className: "holds" },
          { name: "idle", className: "right wide" },
          { name: "others went on", className: "right wide" },
        ]}
      >
        {props.sessions.map((each) => (
          <Row
            key={`${each.tenant} ${each.session}`}
            session={each}
            most={most}
            isSelected={each.session === props.selected}
          />
        ))}
      </Rows>
    </Scroll>
  );
}

function Row({
  session,
  most,
  isSelected,
}: {
  session: SessionView;
  most: number;
  isSelected: boolean;
}) {
  const gone = Math.max(0, session.blocks - session.pool - session.warm - session.cold);
  return (
    <tr aria-selected={isSelected}>
      <td>
        <button
          type="button"
          className="link"
          onClick={() => change({ session: session.session, tenant: session.tenant })}
        >
          {session.session}
        </button>
        {session.tenant !== null && <span className="dim wrap"> {session.tenant}</span>}
        {session.inferred && <span className="dim"> inferred</span>}
      </td>
      <td className="wrap">{stateOf(session)}</td>
      <td className="right wide">{session.turns}</td>
      <td className="right wide">{compact(session.tokens)}</td>
      <td>
        <div style={{ width: `${Math.max(3, (100 * session.blocks) / most)}%` }}>
          <Bar
            label="Blocks"
            slices={[
              { label: "pool", value: session.pool, color: "pool" },
              { label: "warm", value: session.warm, color: "warm" },
              { label: "cold", value: session.cold, color: "cold" },
            ]}
            room={gone}
          />
        </div>
      </td>
      <td className="right wide">{duration(session.idle_s)}</td>
      <td className="right wide">
        {session.state === "ended" ? UNKNOWN : percent(session.return_probability)}
      </td>
    </tr>
  );
}

function stateOf({ state, waits_for, expected_return_in_s: due }: SessionView): string {
  if (state !== "waiting_for_tool") return words(state);
  const tool = waits_for === null ? "a tool" : waits_for;
  if (due === null) return `waits for ${tool}`;
  if (due < 0) return `waits for ${tool}, overdue for ${duration(-due)}`;
  return `waits for ${tool}, due in ${duration(due)}`;
}
