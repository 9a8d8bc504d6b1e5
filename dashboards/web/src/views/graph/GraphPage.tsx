import "./graph.css";

import { useCallback, useMemo, useState } from "react";

import { useResource } from "../../api/resource";
import type { GraphView } from "../../api/types";
import { Await, Empty } from "../../parts/states";
import { change, useRoute } from "../../route";
import { BlockPanel } from "./BlockPanel";
import { emphasisOf } from "./emphasis";
import { GraphCanvas } from "./GraphCanvas";
import { GraphControls } from "./GraphControls";
import { type GraphData, NOTHING, placesOf, toColumns } from "./GraphData";
import { graphPath, MOST_NODES } from "./graphPath";
import { GraphTable } from "./GraphTable";
import type { LayoutName } from "./layouts/shape";
import { useLayout } from "./layouts/useLayout";

const EVERY_MS = 4000;

/**
 * What the cache holds: blocks, how they relate, and where they are.
 *
 * The screen is there before its blocks: drawing begins by compiling, which takes as long as they do.
 */
export function GraphPage() {
  const { params } = useRoute();
  const view = useResource<GraphView>(graphPath(params), EVERY_MS);
  const data = useMemo(() => view.data && toColumns(view.data), [view.data]);
  if (data === undefined && view.error !== undefined)
    return <Await of={{ data, error: view.error }}>{() => null}</Await>;
  if (data?.size === 0) return <NoBlocks />;
  return <Screen data={data ?? NOTHING} />;
}

function NoBlocks() {
  return (
    <Empty title="The cache holds nothing yet">
      Send a request to an engine: its blocks appear here as soon as they are stored.
    </Empty>
  );
}

function Screen({ data }: { data: GraphData }) {
  const { params } = useRoute();
  const [isMissing, setMissing] = useState(false);
  const name = (params.get("layout") ?? "tree") as LayoutName;
  const asTable = params.get("as") === "table" || isMissing;
  const search = params.get("q") ?? "";
  const block = params.get("block");
  const hidden = useMemo(() => new Set(params.get("hide")?.split(",") ?? []), [params.get("hide")]);

  const places = useMemo(() => placesOf(data), [data]);
  const selected = block === null ? -1 : (places.get(block) ?? -1);
  const shown = useMemo(() => data.names.types.map((type) => !hidden.has(type)), [data, hidden]);
  const emphasis = useMemo(() => emphasisOf(data, selected, search), [data, selected, search]);
  const layout = useLayout(data, name);
  const select = (node: number) =>
    change({ block: (node < data.blocks && data.key[node]) || null });
  const drawn = layout?.data ?? NOTHING;
  const missing = useCallback(() => setMissing(true), []);
  return (
    <div className="graph" data-panel={block !== null}>
      <GraphControls
        data={data}
        layout={name}
        search={search}
        hidden={hidden}
        asTable={asTable}
        canDraw={!isMissing}
      />
      <div className="plane">
        {asTable ? (
          <GraphTable data={data} search={search} selected={selected} onSelect={select} />
        ) : (
          <GraphCanvas
            data={drawn}
            layout={layout}
            emphasis={drawn === data ? emphasis : emphasisOf(drawn, -1, "")}
            shown={shown}
            selected={selected}
            onSelect={select}
            onMissing={missing}
          />
        )}
        {!asTable && <Status data={data} settled={layout?.settled ?? false} />}
      </div>
      {block !== null && <BlockPanel block={block} onClose={() => change({ block: null })} />}
    </div>
  );
}

function Status({ data, settled }: { data: GraphData; settled: boolean }) {
  const { known, blocks, ends, leftOut } = data;
  const cut = known.blocks > blocks ? ` of ${known.blocks.toLocaleString("en")}` : "";
  if (data === NOTHING)
    return (
      <p className="status" aria-busy="true">
        asking for blocks
      </p>
    );
  return (
    <p className="status" role="status">
      {blocks.toLocaleString("en")}
      {cut} blocks, {(ends.length / 2).toLocaleString("en")} edges
      {leftOut > 0 && `, ${leftOut.toLocaleString("en")} weaker ones left out`}
      {!settled && ", finding their places"}
      {cut !== "" && blocks < MOST_NODES && (
        <button type="button" className="link" onClick={() => change({ limit: MOST_NODES })}>
          show up to {MOST_NODES.toLocaleString("en")}
        </button>
      )}
    </p>
  );
}
