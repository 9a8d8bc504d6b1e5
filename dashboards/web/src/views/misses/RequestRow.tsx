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
import {
  againOf,
  beyondTheCache,
  computedTokens,
  isWorthTelling,
  longestOf,
  mostSaved,
  type Timing,
  timingOf,
} from "./timing";

interface Props {
  readonly request: RequestView;
  readonly widest: number;
  readonly isOpen: boolean;
  /** Whether those that took longest come first: then a row says what took the time. */
  readonly isOfSlowest: boolean;
  /** Of prefills, in tokens per second; null before one was measured. */
  readonly rate: number | null;
}

/** One request as a bar of its prompt; open, with why it did not find more. */
export function RequestRow({ request, widest, isOpen, isOfSlowest, rate }: Props) {
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
        <span className="took">{duration(timingOf(request, null)?.all)}</span>
        <span className="why">{(isOfSlowest && tookMost(request, rate)) || missed}</span>
      </button>
      {isOpen && <Opened request={request} rate={rate} />}
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
function tookMost(request: RequestView, rate: number | null) {
  const timing = timingOf(request, rate);
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

interface Timed {
  readonly request: RequestView;
  readonly rate: number | null;
}

function Opened({ request, rate }: Timed) {
  const { blocks, miss } = request;
  const nameOf = useEngineNames();
  const from = slicesOf(request).filter(({ value }) => value > 0);
  return (
    <div className="opened">
      <Took request={request} rate={rate} />
      {request.wait && <Waited request={request} wait={request.wait} rate={rate} />}
      {miss ? (
        <Why miss={miss} engine={request.engine} isAside={costNothing(request, rate)} />
      ) : (
        <p className="sentence">It found everything that can be found.</p>
      )}
      <Remedy request={request} rate={rate} />
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

const REST =
  "Most of its time went to its answer, and to what ran beside it: no cache shortens that.";

/** What its engine did before it began. */
function Waited({ request, wait, rate }: Timed & { wait: Wait }) {
  return (
    <p className="sentence wait wrap">
      <b>Why it waited:</b> {wait.sentence} {timeOf(wait, request.waited_s, rate)}{" "}
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

const MOST = 0.9; // of a wait: what is left needs no words; chosen

/** How long what was computed meanwhile takes, and that it is not all of the wait. */
function timeOf({ tokens, prompts }: Wait, waited: number, rate: number | null): string {
  if (!rate || tokens === 0 || prompts === 0) return "";
  const takes = tokens / rate;
  const rest = takes < MOST * waited ? "; for the rest of its wait no prompt is known" : "";
  return `That takes about ${duration(takes)}${rest}.`;
}

/**
 * What would have made it fast: the cache where its prompt took longest; else what did, and of the
 * cache only what would have bought more than a hundredth of its time.
 */
function Remedy({ request, rate }: Timed) {
  const timing = timingOf(request, rate);
  const beyond = beyondTheCache(timing);
  const saved = mostSaved(request, rate);
  const remedy = request.miss?.remedy ?? null;
  const other = beyond === "rest" ? REST : (request.wait?.remedy ?? null);
  return (
    <>
      {beyond !== null && other !== null && (
        <p className="sentence wrap">
          <b>{buys(request, timing, beyond, rate)}</b> <Said text={other} />
        </p>
      )}
      {request.wait?.until != null && beyond === null && (
        <p className="sentence wrap">
          <b>What would have let it begin sooner:</b> <Said text={request.wait.remedy} />
        </p>
      )}
      {remedy !== null && beyond === null && (
        <p className="sentence remedy wrap">
          <b>What would have made it fast:</b> <Said text={remedy} /> {computedAgain(request, rate)}
        </p>
      )}
      {remedy !== null && beyond !== null && isWorthTelling(saved, timing) && (
        <p className="sentence remedy wrap">
          <b>
            {saved === null
              ? "What would have shortened its prompt:"
              : `What would have saved at most ${duration(saved)} of ${duration(timing?.all)}:`}
          </b>{" "}
          <Said text={remedy} />
        </p>
      )}
    </>
  );
}

/** What a remedy for what took longest is worth: keeping what was computed again ends so much. */
function buys(request: RequestView, timing: Timing | null, beyond: string, rate: number | null) {
  const again = beyond === "queue" ? (request.wait?.again ?? 0) : 0;
  if (timing === null || !rate || again === 0 || again / rate > timing.all / 2)
    return "What would have made it fast:";
  return `What would have saved at most ${duration(again / rate)} of ${duration(timing.all)}:`;
}

/** A sentence of the sidecar's, with what stands between backticks as code. */
function Said({ text }: { text: string }) {
  return text.split("`").map((part, at) => (at % 2 ? <code key={at}>{part}</code> : part));
}

/** Where its time went, as a bar and in words. */
function Took({ request, rate }: Timed) {
  const timing = timingOf(request, rate);
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
        {isEstimated && ` (prompt time estimated at ${whole(rate)} tokens/s)`}:
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
function computedAgain(request: RequestView, rate: number | null): string {
  const blocks = request.again;
  const { tokens, seconds } = againOf(request, rate);
  if (blocks === 0) return "";
  const took = seconds === null ? "" : `, about ${duration(seconds)}`;
  return `${counted(blocks, "block")} of what it computed had been in this pool before: ${counted(tokens, "token")}${took}.`;
}

/** Whether something else took its time, and what it missed is not worth a sentence. */
function costNothing(request: RequestView, rate: number | null): boolean {
  const timing = timingOf(request, rate);
  return beyondTheCache(timing) !== null && !isWorthTelling(mostSaved(request, rate), timing);
}

function Why({ miss, engine, isAside }: { miss: Miss; engine: string; isAside: boolean }) {
  return (
    <p className={`sentence reason wrap${isAside ? " dim" : ""}`}>
      <b>Why it found no more:</b> {miss.sentence}{" "}
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
