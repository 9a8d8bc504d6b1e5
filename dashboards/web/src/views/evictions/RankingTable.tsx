import { useResource } from "../../api/resource";
import type { RankedBlock, RankingView } from "../../api/types";
import { duration, signed, whole, words } from "../../format";
import { EnginePicker } from "../../parts/EnginePicker";
import { BlockLink, SessionLink } from "../../parts/links";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";
import { LayerKey } from "../../parts/LayerKey";
import { right, Rows, Scroll } from "../../parts/Rows";
import { Meanings } from "./Meanings";

/** The ranking that an engine has now, the next to go first, with every term. */
export function RankingTable({ engine }: { engine: string | null }) {
  const of = engine === null ? "" : `&engine=${encodeURIComponent(engine)}`;
  const ranking = useResource<RankingView>(`v1/ranking?limit=100${of}`, 2000);
  return <Await of={ranking}>{(data) => <Table ranking={data} />}</Await>;
}

function Table({ ranking }: { ranking: RankingView }) {
  return (
    <Panel
      title={`Ranked by ${ranking.ranked_by}`}
      note={<EnginePicker engines={ranking.engines} value={ranking.engine} />}
    >
      <p className="lead wrap">
        {ranking.sentence}{" "}
        {ranking.epoch !== null && (
          <span className="dim">
            {whole(ranking.ranked)} blocks are in this order: what a rule sends first stands above
            all others, and among blocks of the same rules the higher score goes first. Besides
            these, {whole(ranking.protected)} go only when nothing else is left: those of protected
            layers, and what stands before these in their prompts. Ranking {ranking.epoch},{" "}
            {duration(ranking.age_s)} old.
          </span>
        )}
      </p>
      {ranking.order.length === 0 ? (
        <Empty title="Nothing can be evicted yet">
          An engine gets its first ranking half a second after its first blocks are cached.
        </Empty>
      ) : (
        <Scroll label="Ranking">
          <Rows
            columns={[
              right("place"),
              "block",
              "layer",
              "session",
              right("score"),
              ...ranking.terms.map((term) => right(words(term))),
              "rules",
            ]}
          >
            {ranking.order.map((block) => (
              <Row key={block.key} block={block} />
            ))}
          </Rows>
        </Scroll>
      )}
      <Meanings of={ranking.meanings} />
    </Panel>
  );
}

function Row({ block }: { block: RankedBlock }) {
  return (
    <tr>
      <td className="right">{block.place + 1}</td>
      <td>
        <BlockLink of={block.key} />
        {block.identity !== null && <span className="dim wrap"> {block.identity}</span>}
      </td>
      <td>
        <LayerKey of={block.layer} />
      </td>
      <td>{block.session !== null && <SessionLink of={block.session} tenant={block.tenant} />}</td>
      <td className="right">
        <b>{signed(block.score)}</b>
      </td>
      {block.terms.map((term, place) => (
        <td key={place} className="right dim">
          {signed(term)}
        </td>
      ))}
      <td>{block.standing.map(words).join(", ")}</td>
    </tr>
  );
}
