import { useEffect, useRef } from "react";

import { MOST_EVICTIONS } from "../../api/limits";
import { useResource } from "../../api/resource";
import type { Evictions, EvictionView } from "../../api/types";
import { clock, counted, duration, signed, whole, words } from "../../format";
import { EnginePicker } from "../../parts/EnginePicker";
import { BlockLink, SessionLink } from "../../parts/links";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";
import { useRoute } from "../../route";
import { LayerKey } from "../../parts/LayerKey";
import { Rows, Scroll } from "../../parts/Rows";
import { Meanings } from "./Meanings";
import { RuleTotals } from "./RuleTotals";
import { SINCE } from "./sinceEviction";

const AROUND = 50; // newer records shown above the one that an address names

/** Blocks that left, the newest first, with the rule that decided it and what came of it. */
export function EvictionLog({ engine }: { engine: string | null }) {
  const { params } = useRoute();
  const named = params.get("eviction");
  const of = engine === null ? "" : `&engine=${encodeURIComponent(engine)}`;
  const before = named === null ? "" : `&before=${Number(named) + AROUND}`;
  const path = `v1/evictions?limit=${MOST_EVICTIONS}${of}${before}`;
  const log = useResource<Evictions>(path, 2000, named === null ? SINCE : undefined);
  return <Await of={log}>{(data) => <Log log={data} named={named} />}</Await>;
}

function Log({ log, named }: { log: Evictions; named: string | null }) {
  const isThere = named === null || log.evictions.some((each) => String(each.id) === named);
  return (
    <div className="stack">
      <RuleTotals log={log} />
      <Panel title="Evictions" note={<EnginePicker engines={log.engines} value={log.engine} />}>
        {!isThere && (
          <p className="lead dim">
            Eviction {named} is no longer in the log, which keeps the last {whole(log.kept)}.
          </p>
        )}
        {log.evictions.length === 0 && !isThere ? null : log.evictions.length === 0 ? (
          <Empty title="Nothing was evicted yet">
            The pool has had room for all that it was given.
          </Empty>
        ) : (
          <Scroll label="Evictions">
            <Rows
              columns={[
                "when",
                "block",
                "why",
                { name: "session", className: "wide" },
                { name: "idle", className: "right wide" },
                { name: "copy", className: "wide" },
                "computed again",
              ]}
            >
              {log.evictions.map((each) => (
                <Row key={each.id} eviction={each} isNamed={String(each.id) === named} />
              ))}
            </Rows>
          </Scroll>
        )}
        <Meanings of={log.meanings} />
      </Panel>
    </div>
  );
}

/** Its score when it was ranked, and what that was made of. */
function scored({ terms }: EvictionView): string {
  if (terms === null) return "";
  const parts = Object.entries(terms)
    .filter(([, value]) => value !== 0)
    .map(([name, value]) => `${words(name)} ${signed(value)}`);
  const score = Object.values(terms).reduce((sum, value) => sum + value, 0);
  return ` Score ${signed(score)}: ${parts.join(", ")}.`;
}

/** What was known of it when it left. */
function knownThen({ importance, hits, shared, ranking }: EvictionView): string {
  const of = ranking === null ? "" : ` Ranking number ${ranking}.`;
  const whose = shared ? ", by several sessions" : "";
  return `Its importance was ${importance}; it had been found ${counted(hits, "time")}${whose}.${of}`;
}

function Row({ eviction, isNamed }: { eviction: EvictionView; isNamed: boolean }) {
  const row = useRef<HTMLTableRowElement>(null);
  useEffect(() => {
    if (isNamed) row.current?.scrollIntoView({ block: "center" });
  }, [isNamed]);
  return (
    <tr ref={row} aria-selected={isNamed}>
      <td className="dim">{clock(eviction.at)}</td>
      <td title="Its layer as it was when it left">
        <BlockLink of={eviction.key} />
        <LayerKey of={eviction.layer} className="dim" />
      </td>
      <td className="why">
        <b>{words(eviction.rule)}</b>
        <span className="dim wrap">
          {eviction.sentence} {eviction.rule !== "lru" && knownThen(eviction)}
          {scored(eviction)}
        </span>
      </td>
      <td className="wide">
        {eviction.session !== null && <SessionLink of={eviction.session} />}{" "}
        <span className="dim">{words(eviction.session_state)}</span>
      </td>
      <td className="right wide">{duration(eviction.idle_s)}</td>
      <td className="wide">{eviction.copied}</td>
      <td>
        {eviction.wanted_after_s !== null && (
          <span className="regret">after {duration(eviction.wanted_after_s)}</span>
        )}
      </td>
    </tr>
  );
}
