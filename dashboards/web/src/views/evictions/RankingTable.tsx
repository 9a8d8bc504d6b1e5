import { useResource } from "../../api/resource";
import type { RankedBlock, RankingView } from "../../api/types";
import { duration, signed, whole, words } from "../../format";
import { EnginePicker } from "../../parts/EnginePicker";
import { BlockLink, SessionLink } from "../../parts/links";
import { Panel } from "../../parts/Panel";
import { Await, Empty } from "../../parts/states";

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
            {whole(ranking.ranked)} blocks are ranked, {whole(ranking.protected)} go only when
            nothing else is left; epoch {ranking.epoch}, {duration(ranking.age_s)} old.
          </span>
        )}
      </p>
      {ranking.order.length === 0 ? (
        <Empty title="Nothing is ranked yet">
          An engine gets its first ranking half a second after its first blocks are cached.
        </Empty>
      ) : (
        <div className="scroll" tabIndex={0} role="region" aria-label="Ranking">
          <table className="rows">
            <thead>
              <tr>
                <th className="right">place</th>
                <th>block</th>
                <th>layer</th>
                <th>session</th>
                <th className="right">score</th>
                {ranking.terms.map((term) => (
                  <th key={term} className="right">
                    {words(term)}
                  </th>
                ))}
                <th>rules</th>
              </tr>
            </thead>
            <tbody>
              {ranking.order.map((block) => (
                <Row key={block.key} block={block} />
              ))}
            </tbody>
          </table>
        </div>
      )}
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
        <span className="key">
          <i style={{ background: `var(--${block.layer})` }} />
          {words(block.layer)}
        </span>
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
