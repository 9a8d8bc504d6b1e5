import { type KeyboardEvent, type PointerEvent, useEffect, useMemo, useRef, useState } from "react";

import { useColors } from "../../parts/colors";
import { describe } from "./describe";
import { paletteOf } from "./gl/GraphRenderer";
import type { GraphData } from "./GraphData";
import { GraphStage } from "./GraphStage";
import type { Layout } from "./layouts/useLayout";
import { TimeScale } from "./TimeScale";
import { usePinch } from "./usePinch";

const STEP = 60; // pixels that an arrow key moves
const CLICK = 4; // pixels that a pointer may move in a click
const PAINTED = "kvgraph:painted"; // a mark in the browser's own timings

interface Props {
  readonly data: GraphData;
  /** Of `data`; null until there is one. */
  readonly layout: Layout | null;
  readonly emphasis: Uint8Array;
  readonly shown: readonly boolean[];
  readonly selected: number;
  readonly onSelect: (node: number) => void;
  readonly onMissing: () => void;
}

/** The graph on a canvas: drag and arrow keys move, wheel and + − zoom, a click asks about a block. */
export function GraphCanvas(props: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [stage, setStage] = useState<GraphStage | null>(null);
  const [hovered, hover] = useState(-1);
  const [, frame] = useState(0);
  const colors = useColors();
  const { data, layout, emphasis, shown, onMissing } = props;
  const oldest = useMemo(() => data.idle.reduce((most, each) => Math.max(most, each), 0), [data]);

  useEffect(() => {
    const target = canvas.current;
    if (target === null) return;
    let made: GraphStage;
    try {
      made = new GraphStage(target);
    } catch {
      onMissing();
      return;
    }
    made.onBroken = onMissing;
    made.onFrame = () => frame((count) => count + 1);
    const observer = new ResizeObserver(() => made.resize());
    observer.observe(target);
    const zoom = (event: WheelEvent) => {
      event.preventDefault();
      made.camera.zoomAt(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY);
      made.keep();
    };
    target.addEventListener("wheel", zoom, { passive: false });
    setStage(made);
    return () => {
      target.removeEventListener("wheel", zoom);
      observer.disconnect();
      made.dispose();
      setStage(null);
    };
  }, [onMissing]);

  useEffect(() => {
    if (layout !== null) stage?.place(layout);
  }, [stage, layout]);
  useEffect(() => {
    if (stage === null || layout?.data !== data) return;
    stage.paint(data, emphasis, paletteOf(colors, data), shown);
    if (performance.getEntriesByName(PAINTED).length === 0) {
      requestAnimationFrame(() => requestAnimationFrame(() => performance.mark(PAINTED)));
    }
  }, [stage, layout, data, emphasis, shown, colors]);

  const chosen = useRef(-1);
  const choose = (px: number, py: number) => {
    chosen.current = stage?.nodeAt(px, py) ?? -1;
    props.onSelect(chosen.current);
  };
  useEffect(() => {
    const isElsewhere = props.selected >= 0 && props.selected !== chosen.current;
    if (stage !== null && layout?.settled && isElsewhere) stage.show(props.selected);
    if (layout?.settled) chosen.current = props.selected;
  }, [stage, layout, props.selected]);
  const pointer = usePinch(stage, choose, CLICK);
  const point = (event: PointerEvent) => {
    pointer.onPointerMove(event);
    const { offsetX, offsetY } = event.nativeEvent;
    hover(pointer.isDragging() ? -1 : (stage?.nodeAt(offsetX, offsetY) ?? -1));
  };
  return (
    <div className="canvas">
      <canvas
        ref={canvas}
        tabIndex={0}
        role="img"
        aria-label={`Graph of ${data.blocks} blocks. Arrow keys move, plus and minus zoom, 0 shows all; the table lists the same.`}
        onPointerDown={pointer.onPointerDown}
        onPointerMove={point}
        onPointerUp={pointer.onPointerUp}
        onPointerCancel={pointer.onPointerUp}
        onPointerLeave={() => hover(-1)}
        onKeyDown={(event) => stage !== null && onKey(event, stage, props)}
      />
      {layout?.name === "timeline" && <TimeScale stage={stage} oldest={oldest} />}
      <Halo stage={stage} node={props.selected} />
      <Halo
        stage={stage}
        node={hovered}
        lines={hovered < 0 || hovered >= data.size ? [] : describe(data, hovered)}
      />
    </div>
  );
}

/** A ring around a node, and what it is. */
function Halo(props: { stage: GraphStage | null; node: number; lines?: readonly string[] }) {
  const at = props.node < 0 ? null : props.stage?.pixelsOf(props.node);
  if (at == null) return null;
  const [x, y] = at;
  const width = props.stage?.camera.width ?? 0;
  return (
    <div className="halo" style={{ transform: `translate(${x}px, ${y}px)` }}>
      <i />
      {props.lines !== undefined && props.lines.length > 0 && (
        <div className="tip" data-flip={x > width - 300}>
          {props.lines.map((line) => (
            <p key={line}>{line}</p>
          ))}
        </div>
      )}
    </div>
  );
}

function onKey(event: KeyboardEvent, stage: GraphStage, { data, selected, onSelect }: Props) {
  const { camera } = stage;
  const [x, y] = [camera.width / 2, camera.height / 2];
  const acts: Record<string, () => void> = {
    ArrowLeft: () => camera.pan(STEP, 0),
    ArrowRight: () => camera.pan(-STEP, 0),
    ArrowUp: () => camera.pan(0, STEP),
    ArrowDown: () => camera.pan(0, -STEP),
    "+": () => camera.zoomAt(1.25, x, y),
    "=": () => camera.zoomAt(1.25, x, y),
    "-": () => camera.zoomAt(0.8, x, y),
    "0": () => stage.fit(),
    Enter: () => onSelect(stage.nodeAt(x, y)),
    Escape: () => onSelect(-1),
    PageUp: () => onSelect(data.parent[selected] ?? -1),
    PageDown: () => onSelect(data.parent.indexOf(selected)),
  };
  const act = acts[event.key];
  if (act === undefined || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  act();
  stage.keep();
}
