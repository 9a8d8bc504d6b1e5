import { useEffect, useRef } from "react";

import { useEngineNames } from "../../api/engineNames";
import { useNews } from "../../api/heartbeat";
import type { Miss, RequestView } from "../../api/types";
import { clock, duration, percent, whole, words } from "../../format";
import { Bar } from "../../parts/Bar";
import { Facts } from "../../parts/Facts";
import { BlockLink, SessionLink } from "../../parts/links";
import { change, linkTo } from "../../route";
import { slicesOf } from "./parts";
import { colorOf } from "./reasons";

interface Props {
  readonly request: RequestView;
  readonly widest: number;
  readonly isOpen: boolean;
}

/** One request as a bar of its prompt; open, with why it did not find more. */
export function RequestRow({ request, widest, isOpen }: Props) {
  const { blocks, miss } = request;
  const found = blocks.asked - blocks.computed;
  const row = useRef<HTMLLIElement>(null);
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
        <time>{clock(request.at)}</time>
        <span className="who">{request.session ?? request.request}</span>
        <span className="track">
          <span style={{ width: `${Math.max(2, 100 * Math.sqrt(blocks.asked / widest))}%` }}>
            <Bar label="Blocks of the prompt" slices={slicesOf(request)} />
          </span>
        </span>
        <span className="share">{percent(found, blocks.asked)}</span>
        <span className="why">
          {miss && blocks.computed > 0 && (
            <>
              <i style={{ background: `var(--${colorOf(miss.reason)})` }} />
              {words(miss.reason)}
            </>
          )}
        </span>
      </button>
      {isOpen && <Opened request={request} />}
    </li>
  );
}

function Opened({ request }: { request: RequestView }) {
  const { blocks, miss } = request;
  const nameOf = useEngineNames();
  const rate = useNews()?.now.prefill_tokens_per_s ?? null;
  const from = slicesOf(request).filter(({ value }) => value > 0);
  return (
    <div className="opened">
      {miss ? (
        <Why miss={miss} engine={request.engine} />
      ) : (
        <p className="sentence">It found everything that can be found.</p>
      )}
      <Facts
        of={{
          request: <span className="mono">{request.request}</span>,
          session: request.session && <SessionLink of={request.session} tenant={request.tenant} />,
          tenant: request.tenant,
          engine: nameOf(request.engine),
          prompt: `${whole(request.prompt_tokens)} tokens, ${whole(blocks.asked)} full blocks of ${request.block_size}`,
          blocks: from.map(({ label, value }) => `${whole(value)} ${label}`).join(", "),
          cost: costOf(request, rate),
          ended: request.finished === null ? "it runs" : words(request.finished),
        }}
      />
    </div>
  );
}

/** What was computed, and about how long that takes by the engines' measured speed. */
function costOf({ prompt_tokens, blocks, block_size }: RequestView, rate: number | null): string {
  const computed = prompt_tokens - (blocks.asked - blocks.computed) * block_size;
  const took = rate ? `, about ${duration(computed / rate)} at the speed that was measured` : "";
  return `${whole(computed)} tokens were computed${took}`;
}

function Why({ miss, engine }: { miss: Miss; engine: string }) {
  return (
    <p className="sentence wrap">
      {miss.sentence}{" "}
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
