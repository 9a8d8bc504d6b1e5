import { Button } from "@mantine/core";
import { useMemo, useState } from "react";

import { duration, shortKey } from "../../format";
import { Empty } from "../../parts/states";
import { LayerKey } from "../../parts/LayerKey";
import { right, Rows, Scroll } from "../../parts/Rows";
import { layerOf, sessionOf, whereIs } from "./describe";
import { found } from "./emphasis";
import type { GraphData } from "./GraphData";

const PAGE = 200;

interface Props {
  readonly data: GraphData;
  readonly search: string;
  readonly selected: number;
  readonly onSelect: (node: number) => void;
}

/** The same blocks as rows, those used last first: for screen readers, and without WebGL2. */
export function GraphTable({ data, search, selected, onSelect }: Props) {
  const [shown, show] = useState(PAGE);
  const rows = useMemo(() => {
    const all = found(data, search).filter((node) => node < data.blocks);
    return all.sort((a, b) => data.idle[a]! - data.idle[b]! || data.depth[a]! - data.depth[b]!);
  }, [data, search]);
  if (rows.length === 0) {
    return (
      <Empty title="No block is like that">
        Search for a part of a session, a tenant, a layer or a key.
      </Empty>
    );
  }
  return (
    <Scroll label="Blocks" className="table">
      <Rows
        columns={[
          "block",
          "layer",
          "session",
          right("of its chain"),
          right("hits"),
          right("importance"),
          "where",
          right("last used"),
        ]}
      >
        {rows.slice(0, shown).map((node) => (
          <tr key={data.key[node]} aria-selected={node === selected}>
            <td>
              <button type="button" className="link mono" onClick={() => onSelect(node)}>
                {shortKey(data.key[node]!)}
              </button>
            </td>
            <td>
              <LayerKey of={layerOf(data, node)} />
            </td>
            <td className="wrap">{sessionOf(data, node)}</td>
            <td className="right">{data.depth[node]! + 1}</td>
            <td className="right">{data.hits[node]}</td>
            <td className="right">{data.importance[node]! / 100}</td>
            <td>{whereIs(data, node)}</td>
            <td className="right">{duration(data.idle[node])} ago</td>
          </tr>
        ))}
      </Rows>
      {rows.length > shown && (
        <Button variant="default" size="xs" m="sm" onClick={() => show(shown + PAGE)}>
          Show more of {rows.length.toLocaleString("en")}
        </Button>
      )}
    </Scroll>
  );
}
