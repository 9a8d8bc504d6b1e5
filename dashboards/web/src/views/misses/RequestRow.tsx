import { type ReactNode, useEffect, useRef } from "react";

import { useEngineNames } from "../../api/engineNames";
import type { Miss, RequestView, Wait } from "../../api/types";
import { clock, counted, duration, percent, shortened, whole, words } from "../../format";
import { Bar, type Slice } from "../../parts/Bar";
import { Facts } from "../../parts/Facts";
import { Legend } from "../../parts/Legend";
import { BlockLink, SessionLink } from "../../parts/links";
import { change, linkTo } from "../../route";
import { slicesOf } from "./parts";
import { colorOf } from "./reasons";
import { LargerPool } from "./LargerPool";
import { Remedies } from "./Remedies";
import { againOf, computedTokens, longestOf, timingOf } from "./timing";

interface Props {
  readonly request: RequestView;
  readonly widest: number;
  readonly isOpen: boolean;
  /** Whether those that took longest come first: then a row says what took the time. */
  readonly isOfSlowest: boolean;
}

/** One request as a bar of its prompt; open, with why it did not find more. */
export function RequestRow({ request, widest, isOpen, isOfSlowest }: Props) {
  const { blocks, miss } = request;
  const found = blocks.asked - blocks.computed;
  const row = useRef<HTMLLIElement>(null);
  const missed = miss && blocks.computed > 0 && (
    <Dot color={colorOf(miss.reason)}>{words(miss.reason)}</Dot>
  );
  useEffect(() => {
    if (isOpen) row.current?.scrollIntoView({ block: "nearest" });
  }, [isOpen]);
  return (
    <li ref={row} data-open={isOpen}>
      <button
        type="button"
        aria-expanded={isOpen}
        onClick={() => change({ request: isOpen ? null : request.id })}
      >
        <time title="When it arrived">{clock(request.at - request.waited_s)}</time>
        <span className="who" title={request.session ?? request.request}>
          {shortened(request.session ?? request.request)}
        </span>
        <span className="track">
          <span style={{ width: `${Math.max(2, 100 * Math.sqrt(blocks.asked / widest))}%` }}>
            <Bar label="Blocks of the prompt" slices={slicesOf(request)} />
          </span>
        </span>
        <span className="share">{percent(found, blocks.asked)}</span>
        <span className="took">{duration(timingOf(request)?.all)}</span>
        <span className="why">{(isOfSlowest && tookMost(request)) || missed}</span>
      </button>
      {isOpen && <Opened request={request} />}
    </li>
  );
}

function Dot({ color, children }: { color: string; children: ReactNode }) {
  return (
    <>
      <i style={{ background: `var(--${color})` }} />
      {children}
    </>
  );
}

/** What took most of a request's time, and of a prompt why it did not find more; null: unknown. */
function tookMost(request: RequestView) {
  const timing = timingOf(request);
  const longest = longestOf(timing);
  if (timing === null || longest === null) return null;
  const reason = request.miss && longest === "prompt" ? `: ${words(request.miss.reason)}` : "";
  return (
    <Dot color={COLORS[longest]}>
      {NAMES[longest]} {duration(timing[longest])}
      {reason}
    </Dot>
  );
}

const NAMES = { held: "held", queue: "queue", prompt: "prompt", rest: "answer" };
const COLORS = { held: "held", queue: "waits", prompt: "computed", rest: "answers" };

function Opened({ request }: { request: RequestView }) {
  const { blocks, miss } = request;
  const nameOf = useEngineNames();
  const from = slicesOf(request).filter(({ value }) => value > 0);
  const isCaches = request.remedies.some((each) => each.of === "prompt");
  return (
    <div className="opened">
      <Took request={request} />
      {request.wait && <Waited wait={request.wait} />}
      {miss ? (
        <Why
          miss={miss}
          engine={request.engine}
          isAside={!isCaches}
          again={computedAgain(request)}
        />
      ) : (
        <p className="sentence">It found everything that can be found.</p>
      )}
      <Remedies
        of={request.remedies}
        all={timingOf(request)?.all ?? null}
        engine={request.engine}
      />
      {request.again > 0 && <LargerPool engine={request.engine} />}
      <Facts
        of={{
          request: <span className="mono">{request.request}</span>,
          session: request.session && <SessionLink of={request.session} tenant={request.tenant} />,
          tenant: request.tenant,
          engine: nameOf(request.engine),
          prompt: `${counted(request.prompt_tokens, "token")}, ${counted(blocks.asked, "full block")} of ${request.block_size}`,
          blocks: from.map(({ label, value }) => `${whole(value)} ${label}`).join(", "),
          arrived: clock(request.at - request.waited_s),
          begun: clock(request.at),
          ended: request.finished === null ? "it runs" : words(request.finished),
        }}
      />
    </div>
  );
}

/** What its engine did before it began. */
function Waited({ wait }: { wait: Wait }) {
  return (
    <p className="sentence wait wrap">
      <b>Why it waited:</b> {wait.sentence}{" "}
      {wait.largest !== null && (
        <span className="ways">
          <a href={linkTo("misses", { request: wait.largest })}>
            {wait.prompts > 0 ? "the largest" : "that one"}
          </a>
        </span>
      )}
    </p>
  );
}

/** Where its time went, as a bar and in words. */
function Took({ request }: { request: RequestView }) {
  const timing = timingOf(request);
  const computed = counted(computedTokens(request), "token");
  if (timing === null)
    return (
      <p className="sentence">
        {request.finished === null ? "It runs" : "Its end was not heard of"}; {computed} of its
        prompt were not found.
      </p>
    );
  const { held, queue, prompt, rest } = timing;
  const isEstimated = prompt !== null && rest > 0; // else all that is left was its prompt's
  const answer =
    request.answer_tokens == null
      ? "its answer"
      : `its answer of ${counted(request.answer_tokens, "token")}`;
  const slices = [
    { label: "held until there was room", color: "held", value: held },
    { label: "in the queue", color: "waits", value: queue },
    { label: `computing ${computed} of its prompt`, color: "computed", value: prompt ?? 0 },
    {
      label: prompt === null ? `computing ${computed}, and ${answer}` : answer,
      color: "answers",
      value: rest,
    },
  ].filter(({ value }) => value >= 0.0005);
  return (
    <div className="took">
      <p className="sentence">
        <b>It took {duration(timing.all)}</b>
        {isEstimated && ` (its prompt's part is estimated, by its engine's measured speed)`}:
      </p>
      <Bar label="Milliseconds" slices={slices.map(inMilliseconds)} />
      <Legend entries={slices.map((each) => ({ ...each, value: duration(each.value) }))} />
    </div>
  );
}

function inMilliseconds(slice: Slice): Slice {
  return { ...slice, value: Math.round(1000 * slice.value) };
}

/** How much of what it computed had been there before. */
function computedAgain(request: RequestView): string {
  const blocks = request.again;
  const { tokens, seconds } = againOf(request);
  if (blocks === 0) return "";
  const took = seconds === null ? "" : `, about ${duration(seconds)}`;
  return `${counted(blocks, "block")} of what it computed had been in this pool before: ${counted(tokens, "token")}${took}.`;
}

interface WhyProps {
  readonly miss: Miss;
  readonly engine: string;
  /** Whether a cache that kept more would have saved next to nothing. */
  readonly isAside: boolean;
  readonly again: string;
}

function Why({ miss, engine, isAside, again }: WhyProps) {
  return (
    <p className={`sentence reason wrap${isAside ? " dim" : ""}`}>
      <b>Why it found no more:</b> {miss.sentence} {again}{" "}
      <span className="ways">
        {miss.key !== null && (
          <>
            block <BlockLink of={miss.key} />
          </>
        )}
        {miss.session !== null && (
          <>
            session <SessionLink of={miss.session} tenant={miss.tenant} />
          </>
        )}
        {miss.eviction !== null && (
          <a href={linkTo("evictions", { tab: "log", engine, eviction: miss.eviction })}>
            its eviction
          </a>
        )}
      </span>
    </p>
  );
}
