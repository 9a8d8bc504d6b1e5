import { CloseButton, CopyButton, Tooltip } from "@mantine/core";

import { useEngineNames } from "../../api/engineNames";
import { useResource } from "../../api/resource";
import type { BlockView } from "../../api/types";
import { counted, duration, percent, signed, whole, words } from "../../format";
import { Facts } from "../../parts/Facts";
import { BlockLink, SessionLink } from "../../parts/links";
import { Moments } from "../../parts/Moments";
import { Await } from "../../parts/states";
import { LayerKey } from "../../parts/LayerKey";
import { type Explained, explainedOf } from "./explained";
import { TermBars } from "./TermBars";

type Named = (engine: string) => string;

/** Why one block ranks where it does, and what happened to it. */
export function BlockPanel(props: { block: string; onClose: () => void }) {
  const view = useResource<BlockView>(`v1/blocks/${encodeURIComponent(props.block)}`, 2000);
  return (
    <aside className="block" aria-label="Block">
      <header>
        <div>
          <h2>Block</h2>
          <CopyButton value={props.block}>
            {({ copied, copy }) => (
              <Tooltip label={copied ? "Copied" : "Copy its key"}>
                <button type="button" className="link mono" onClick={copy}>
                  {props.block}
                </button>
              </Tooltip>
            )}
          </CopyButton>
        </div>
        <CloseButton aria-label="Close" onClick={props.onClose} />
      </header>
      <Await of={view}>{(data) => <Explanation view={data} />}</Await>
    </aside>
  );
}

function Explanation({ view }: { view: BlockView }) {
  const explained = explainedOf(view);
  const nameOf = useEngineNames();
  return (
    <div className="stack">
      <Facts of={factsOf(explained, nameOf)} />
      <section>
        <h3>
          Its score, {signed(explained.score)}, by {explained.policy}
        </h3>
        <TermBars terms={explained.terms} />
        <p className="dim">A higher score goes first. {sentence(explained)}</p>
      </section>
      <section>
        <h3>What happened to it</h3>
        <Moments moments={view.history} />
      </section>
    </div>
  );
}

function factsOf(block: Explained, nameOf: Named) {
  const [from, to] = block.tokens;
  return {
    layer: <LayerKey of={block.layer} />,
    name: block.identity,
    session: block.session && <SessionLink of={block.session} tenant={block.tenant} />,
    tenant: block.tenant,
    model: block.model,
    tokens: `${from} to ${to}, block ${block.depth + 1} of its chain`,
    importance: percent(block.importance),
    used: `by ${counted(block.requests, "request")}, found by ${block.hits}, last ${duration(block.age_s)} ago`,
    "held by": held(block, nameOf) || "nobody: remembered only",
    copies: block.copies,
    rank: ranked(block, nameOf) || null,
    parent: block.parent && <BlockLink of={block.parent} />,
  };
}

function held({ tiers }: Explained, nameOf: Named): string {
  const each = Object.entries(tiers).map(
    ([engine, places]) => `${places.join(" and ")} on ${nameOf(engine)}`,
  );
  return each.join("; ");
}

function ranked({ ranks }: Explained, nameOf: Named): string {
  const each = Object.entries(ranks).map(
    ([engine, { rank, of, ranked_by }]) =>
      `${whole(rank)} of ${whole(of)} go before it on ${nameOf(engine)}, by ${ranked_by}`,
  );
  return each.join("; ");
}

const STANDINGS: Record<string, string> = {
  session_over: "of a session that is over",
  pinned: "leased",
  reserved: "in the room that is reserved for its session",
  protected_layer: "of a protected layer",
};

function sentence({ standing, over_share_on, policy, who_ranks }: Explained): string {
  const said = standing.map((rule) => STANDINGS[rule] ?? words(rule)).join(", ");
  const beyond = over_share_on.length > 0 ? ", beyond the share that is kept" : "";
  const rules = standing.length > 0 ? `It is ${said}${beyond}. ` : "";
  return who_ranks === policy ? rules : `${rules}${who_ranks}.`;
}
