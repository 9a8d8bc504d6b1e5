import { useEffect, useRef, useState } from "react";

import { type GraphData, NOTHING, placesOf } from "../GraphData";
import type { Answer, LayoutName, Positions, Question, Shape } from "./shape";

/** Positions of `data`'s nodes, and whether they are final. */
export interface Layout {
  readonly data: GraphData;
  readonly name: LayoutName;
  readonly positions: Positions;
  readonly settled: boolean;
}

/** Where the nodes stand, from a worker; null until there is an answer. */
export function useLayout(data: GraphData, name: LayoutName): Layout | null {
  const [layout, setLayout] = useState<Layout | null>(null);
  const worker = useRef<Worker | null>(null);
  const latest = useRef<Layout | null>(null);
  const asked = useRef(0);

  useEffect(() => {
    worker.current ??= newWorker(); // it starts while the graph is asked for
    return () => {
      worker.current?.terminate();
      worker.current = null;
    };
  }, []);

  useEffect(() => {
    if (data === NOTHING) return;
    const at = (worker.current ??= newWorker());
    const id = ++asked.current;
    at.onmessage = ({ data: answer }: MessageEvent<Answer>) => {
      if (answer.id !== id) return;
      latest.current = { data, name, positions: answer.positions, settled: answer.settled };
      setLayout(latest.current);
    };
    const start = latest.current?.name === name ? carriedOver(latest.current, data) : null;
    at.postMessage({ id, layout: name, shape: shapeOf(data), start } satisfies Question);
  }, [data, name]);

  return layout;
}

function newWorker(): Worker {
  return new Worker(new URL("./layout.worker.ts", import.meta.url), { type: "module" });
}

function shapeOf(data: GraphData): Shape {
  const { size, blocks, parent, depth, session, idle, ends, offsets } = data;
  const rank = Uint32Array.from(data.key, (key) => parseInt(key.slice(-8), 16) || 0);
  return { size, blocks, parent, depth, session, idle, rank, ends, offsets };
}

/** Where nodes of another graph stood, by their keys; NaN where they are new. */
export function carriedOver(layout: Layout, data: GraphData): Positions {
  const before = placesOf(layout.data);
  const positions = new Float32Array(2 * data.size).fill(NaN);
  data.key.forEach((key, place) => {
    const old = before.get(key);
    if (old === undefined) return;
    positions[2 * place] = layout.positions[2 * old]!;
    positions[2 * place + 1] = layout.positions[2 * old + 1]!;
  });
  return positions;
}
