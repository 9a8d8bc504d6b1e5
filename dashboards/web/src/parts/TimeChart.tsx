import "uplot/dist/uPlot.min.css";

import { useEffect, useRef } from "react";
import uPlot from "uplot";

import { type Colors, mix, useColors } from "./colors";

/** A line over time, or an area; `color` is the name of one of the page's colours. */
export interface Line {
  readonly label: string;
  readonly color: string;
  readonly values: readonly (number | null)[];
  readonly fill?: boolean;
  readonly dash?: boolean;
  readonly width?: number;
  /** It holds its value until the next one. */
  readonly steps?: boolean;
}

/** Lines over Unix seconds; areas are drawn in the order given, so that the tallest comes first. */
export function TimeChart(props: {
  label: string;
  starts: readonly number[];
  lines: readonly Line[];
  height?: number;
  max?: number;
  format: (value: number) => string;
}) {
  const box = useRef<HTMLDivElement>(null);
  const colors = useColors();
  const height = props.height ?? 200;
  const shape = props.lines.map((line) => `${line.label} ${line.color} ${line.dash}`).join();

  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;

  useEffect(() => {
    const target = box.current;
    if (target === null) return;
    const made = new uPlot(
      options(latest, colors, target.clientWidth, height),
      columns(latest.current),
      target,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: target.clientWidth, height }));
    observer.observe(target);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [colors, shape, height]);

  useEffect(() => plot.current?.setData(columns(props)), [props]);

  return <div className="chart" ref={box} role="img" aria-label={said(props)} />;
}

// uPlot declares these as a const enum, which a file compiled alone cannot read.
const SERIES = "series" as uPlot.DrawOrderKey.Series;
const AXES = "axes" as uPlot.DrawOrderKey.Axes;

type Props = Parameters<typeof TimeChart>[0];

function columns(props: Props): uPlot.AlignedData {
  return [[...props.starts], ...props.lines.map((line) => [...line.values])] as uPlot.AlignedData;
}

function said({ label, lines, format }: Props): string {
  const last = lines.map((line) => {
    const value = line.values.findLast((each) => each !== null);
    return `${line.label} ${value == null ? "unknown" : format(value)}`;
  });
  return `${label}, now: ${last.join(", ")}`;
}

function options(
  latest: { current: Props },
  colors: Colors,
  width: number,
  height: number,
): uPlot.Options {
  const grid = { stroke: colors("line"), width: 1 };
  const axis: uPlot.Axis = {
    stroke: colors("dim"),
    font: "11px system-ui, sans-serif",
    grid,
    ticks: { show: false },
  };
  return {
    width,
    height,
    padding: [8, 8, 0, 0],
    drawOrder: [SERIES, AXES],
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    legend: { show: false },
    scales: { y: { range: (_, __, top) => [0, latest.current.max ?? Math.max(top * 1.08, 1e-6)] } },
    axes: [
      {
        ...axis,
        size: 30,
        space: 80,
        grid: { show: false },
        values: (plot, ticks) => ticks.map((tick) => timeOf(tick, spanOf(plot))),
      },
      {
        ...axis,
        size: 52,
        space: 34,
        values: (_, ticks) => ticks.map((tick) => latest.current.format(tick)),
      },
    ],
    series: [{}, ...latest.current.lines.map((line) => series(line, colors))],
    plugins: [readout(latest)],
  };
}

const SHORT_S = 600; // below, ticks say seconds too

function spanOf(plot: uPlot): number {
  return (plot.scales["x"]?.max ?? 0) - (plot.scales["x"]?.min ?? 0);
}

function timeOf(unixSeconds: number, span: number): string {
  const time = new Date(unixSeconds * 1000).toTimeString();
  return time.slice(0, span < SHORT_S ? 8 : 5);
}

function series(line: Line, colors: Colors): uPlot.Series {
  const color = colors(line.color);
  return {
    label: line.label,
    stroke: color,
    width: line.width ?? 1.75,
    points: { show: false, filter: lonely, size: 5, fill: color },
    spanGaps: false,
    ...(line.fill ? { fill: mix(color, colors("panel"), 0.26) } : {}),
    ...(line.steps ? { paths: uPlot.paths.stepped!({ align: 1 }) } : {}),
    ...(line.dash ? { dash: [5, 4] } : {}),
  };
}

/** Values without a neighbour, through which no line goes: they are drawn as points. */
function lonely(plot: uPlot, at: number): number[] | null {
  const values = plot.data[at] ?? [];
  const found = [...values.keys()].filter(
    (step) => values[step] != null && values[step - 1] == null && values[step + 1] == null,
  );
  return found.length > 0 ? found : null;
}

/** A box beside the cursor that says every line's value there. */
function readout(latest: { current: Props }): uPlot.Plugin {
  const box = document.createElement("div");
  box.className = "readout";
  return {
    hooks: {
      init: (plot) => plot.over.append(box),
      setCursor: (plot) => {
        const index = plot.cursor.idx;
        box.hidden = index == null || (plot.cursor.left ?? -1) < 0;
        if (box.hidden || index == null) return;
        box.replaceChildren(...rows(latest.current, index));
        const left = plot.cursor.left ?? 0;
        const flip = left > plot.over.clientWidth / 2;
        box.style.translate = `${flip ? left - box.offsetWidth - 12 : left + 12}px 8px`;
      },
    },
  };
}

function rows(props: Props, index: number): HTMLElement[] {
  const time = document.createElement("time");
  time.textContent = new Date((props.starts[index] ?? 0) * 1000).toLocaleTimeString();
  const lines = props.lines.map((line) => {
    const row = document.createElement("div");
    const value = line.values[index];
    row.style.setProperty("--swatch", `var(--${line.color})`);
    row.textContent = `${line.label} ${value == null ? "–" : props.format(value)}`;
    return row;
  });
  return [time, ...lines];
}
