import { CloseButton } from "@mantine/core";

import { useResource } from "../../api/resource";
import type { SessionTimeline } from "../../api/types";
import { compact, duration, percent, UNKNOWN, whole, words } from "../../format";
import { Figure } from "../../parts/Figure";
import { Legend } from "../../parts/Legend";
import { Moments } from "../../parts/Moments";
import { Await } from "../../parts/states";
import { TimeChart } from "../../parts/TimeChart";
import { change, linkTo, useRoute } from "../../route";
import { SINCE } from "./sinceTurn";
import { reachOf, thatTime } from "./thatTime";
import { TimeTravel } from "./TimeTravel";
import { Turns } from "./Turns";

/** One session: its turns and pauses, what it held, and what happened to it. */
export function Timeline(props: { session: string; tenant: string | null }) {
  const tenant = props.tenant === null ? "" : `tenant=${encodeURIComponent(props.tenant)}`;
  const path = `v1/sessions/${encodeURIComponent(props.session)}?${tenant}`;
  const timeline = useResource<SessionTimeline>(path, 2000, SINCE);
  return (
    <section className="panel timeline" aria-label={`Session ${props.session}`}>
      <header>
        <h2 className="wrap">{props.session}</h2>
        <span>
          <a href={linkTo("misses", { session: props.session })}>its requests</a>{" "}
          <a href={linkTo("graph", { q: props.session })}>its blocks</a>
          <CloseButton
            aria-label="Close"
            onClick={() => change({ session: null, tenant: null, at: null })}
          />
        </span>
      </header>
      <Await of={timeline}>{(data) => <Opened timeline={data} />}</Await>
    </section>
  );
}

function Opened({ timeline }: { timeline: SessionTimeline }) {
  const { session, residency, turns, moments } = timeline;
  const wanted = useRoute().params.get("at");
  const reach = reachOf(timeline);
  const then = wanted === null || reach === null ? null : thatTime(timeline, Number(wanted));
  const past = then === null ? moments : moments.filter(({ at }) => at <= then.at);
  return (
    <div className="stack">
      <dl className="figures">
        <Figure
          label="State"
          value={words(session.state)}
          note={`for ${duration(session.idle_s)}`}
        />
        <Figure
          label="Turns"
          value={session.turns}
          note={`${duration(session.mean_pause_s)} between them`}
        />
        <Figure label="Context" value={compact(session.tokens)} note="tokens" />
        <Figure
          label="Holds"
          value={whole(session.pool)}
          note={`in the pool, ${whole(session.warm)} warm, ${whole(session.cold)} cold`}
        />
        <Figure
          label="Others went on"
          value={session.state === "ended" ? UNKNOWN : percent(session.return_probability)}
          note={`after as many turns; ${due(session.expected_return_in_s)}`}
        />
      </dl>
      <Turns turns={turns} at={then?.at ?? null} />
      {reach !== null && <TimeTravel reach={reach} then={then} />}
      {residency.starts.length > 1 && (
        <div>
          <h3>What it held, in blocks</h3>
          <TimeChart
            label="Blocks by tier"
            starts={residency.starts}
            lines={heldLines(timeline)}
            height={150}
            format={compact}
          />
          <Legend entries={heldLines(timeline)} />
        </div>
      )}
      <div>
        <h3>{then === null ? "What happened" : "What had happened by then"}</h3>
        <Moments moments={past.slice(0, 30)} />
      </div>
    </div>
  );
}

/** What each tier held: an area for the pool, lines for copies of what is in it, or left it. */
function heldLines({ residency: { pool, warm, cold } }: SessionTimeline) {
  const all = [
    { label: "pool", color: "pool", values: pool, fill: true },
    { label: "warm copies", color: "warm", values: warm, fill: false },
    { label: "cold copies", color: "cold", values: cold, fill: false },
  ];
  return all
    .filter(({ label, values }) => label === "pool" || values.some(Boolean))
    .map((line) => ({ ...line, steps: true }));
}

function due(seconds: number | null): string {
  if (seconds === null) return "nobody said when";
  return seconds >= 0 ? `due in ${duration(seconds)}` : `${duration(-seconds)} overdue`;
}
