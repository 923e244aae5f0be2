/** A line chart: thin lines with their number at the end, bands between lows and highs, the same cursor in all charts of a page. */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { spread } from "./label-places";
import { compact } from "./number-format";
import { type Theme, translucent } from "./palette";

export interface Line {
  /** For the legend; several lines of one run have the same `mark`. */
  title: string;
  color: string;
  /** At the end of the line; "" for none. */
  mark: string;
  x: readonly number[];
  y: readonly (number | null)[];
  /** Drawn pale behind `y`, where `y` is smoothed. */
  raw?: readonly (number | null)[] | undefined;
  low?: readonly (number | null)[] | undefined;
  high?: readonly (number | null)[] | undefined;
  dashed?: boolean;
}

export interface ChartProps {
  lines: readonly Line[];
  /** x of vertical lines: another attempt of the run began. */
  breaks?: readonly number[];
  xTitle: string;
  height: number;
  theme: Theme;
  /** Charts with the same text share their cursor. */
  group: string;
  logarithmic?: boolean;
  /** For readers of the page who do not see it. */
  label: string;
  /** x values are text of their own. */
  xText?: (value: number) => string;
  /** Place of the cursor: x, and the value of each line there; null: outside. */
  onCursor?: (at: { x: number; values: (number | null)[] } | null) => void;
  onClick?: (x: number) => void;
}

const INK: Record<Theme, { text: string; grid: string; axis: string; mark: string }> = {
  light: { text: "#59626a", grid: "#eceff1", axis: "#cfd6da", mark: "#8a949b" },
  dark: { text: "#9aa5ad", grid: "#22282d", axis: "#343c43", mark: "#6f7a82" },
};
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

/** Distances of ticks between steps. */
const WHOLE = [1, 2, 5].flatMap((first) => Array.from({ length: 10 }, (_, power) => first * 10 ** power)).sort((one, other) => one - other);

/** Series of uPlot that one line takes, in this order. */
const ROLES = ["low", "high", "raw", "y"] as const;

export function Chart(props: ChartProps) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;

  const { lines, theme, height, group, logarithmic, xTitle, label } = props;
  const shape = JSON.stringify([lines.map((line) => [line.title, line.color, line.mark, line.dashed, !!line.raw, !!line.low]), theme, height, group, !!logarithmic, xTitle]);

  useEffect(() => {
    const element = host.current!;
    const chart = new uPlot(optionsOf(latest, element.clientWidth), dataOf(latest.current), element);
    plot.current = chart;
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0) chart.setSize({ width: element.clientWidth, height: latest.current.height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape]);

  const drawn = useRef("");
  useEffect(() => {
    const chart = plot.current;
    if (!chart) return;
    // New points of a live run: a part of the x axis that was zoomed into stays in view.
    const x = chart.data[0];
    const zoomed = x.length > 0 && chart.scales.x!.min !== undefined && (chart.scales.x!.min > x[0]! || chart.scales.x!.max! < x[x.length - 1]!);
    const range = { min: chart.scales.x!.min!, max: chart.scales.x!.max! };
    chart.batch(() => {
      chart.setData(dataOf(latest.current), !zoomed || drawn.current !== shape);
      if (zoomed && drawn.current === shape) chart.setScale("x", range);
    });
    drawn.current = shape;
  }, [lines, props.breaks]);

  return <div class="chart" ref={host} role="img" aria-label={label} style={{ height: `${height}px` }} />;
}

function dataOf({ lines, logarithmic }: ChartProps): uPlot.AlignedData {
  const positive = (values: readonly (number | null)[]) => (logarithmic ? values.map((value) => (value !== null && value > 0 ? value : null)) : [...values]);
  const tables = lines.map((line) => {
    const columns: (number | null)[][] = [];
    for (const role of ROLES) {
      const values = line[role];
      if (values) columns.push(positive(values));
    }
    return [[...line.x], ...columns] as uPlot.AlignedData;
  });
  if (tables.length === 0) return [[]];
  return tables.length === 1 ? tables[0]! : uPlot.join(tables);
}

function optionsOf(latest: { current: ChartProps }, width: number): uPlot.Options {
  const { lines, theme, height, group, logarithmic, xTitle } = latest.current;
  const ink = INK[theme];
  const series: uPlot.Series[] = [{ label: xTitle }];
  const bands: uPlot.Band[] = [];
  /** Series that has the values of each line. */
  const main: number[] = [];
  for (const line of lines) {
    const base = { points: { show: false }, spanGaps: false };
    if (line.low && line.high) {
      bands.push({ series: [series.length + 1, series.length], fill: translucent(line.color, theme === "light" ? 0.12 : 0.18) });
      series.push({ ...base, label: `${line.title}, lowest`, stroke: "transparent", width: 0 }, { ...base, label: `${line.title}, highest`, stroke: "transparent", width: 0 });
    }
    if (line.raw) series.push({ ...base, label: `${line.title}, each point`, stroke: translucent(line.color, 0.28), width: 1 });
    main.push(series.length);
    series.push({
      ...base,
      label: line.title,
      stroke: line.color,
      width: 1.5,
      dash: line.dashed ? [5, 3] : [],
      // A single point has no line.
      points: { show: (chart, place) => count(chart.data[place]!) === 1, size: 5, fill: line.color },
    });
  }
  const axis: uPlot.Axis = {
    stroke: ink.text,
    font: FONT,
    grid: { stroke: ink.grid, width: 1 },
    ticks: { stroke: ink.axis, width: 1, size: 4 },
    gap: 3,
  };
  return {
    width: Math.max(width, 50),
    height,
    series,
    bands,
    padding: [8, lines.some((line) => line.mark) ? 16 : 6, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: group, scales: ["x", null] },
      points: { size: 5 },
      drag: { x: true, y: false, dist: 6 },
      y: false,
      focus: { prox: -1 },
      bind: {
        click: (chart, _target, handler) => (event) => {
          if (chart.select.width === 0 && chart.cursor.left! >= 0) latest.current.onClick?.(chart.posToVal(chart.cursor.left!, "x"));
          return handler(event);
        },
      },
    },
    scales: {
      x: { time: false, range: (_chart, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
      y: logarithmic ? { distr: 3 } : { range: (_chart, low, high) => rangeOf(low, high) },
    },
    axes: [
      { ...axis, size: 24, space: 60, ...(xTitle === "step" ? { incrs: WHOLE } : {}), values: (_chart, values) => values.map((value) => (latest.current.xText ?? compact)(value)) },
      {
        ...axis,
        space: 28,
        size: (_chart, values) => Math.max(34, ...(values ?? []).map((text) => String(text ?? "").length * 6.2 + 12)),
        values: (_chart, values) => values.map((value) => (value === null || value === undefined ? "" : compact(value))),
      },
    ],
    hooks: {
      setCursor: [
        (chart) => {
          const { idx } = chart.cursor;
          if (idx === null || idx === undefined || (chart.cursor.left ?? -1) < 0) latest.current.onCursor?.(null);
          else latest.current.onCursor?.({ x: chart.data[0][idx]!, values: main.map((place) => nearest(chart.data[place]!, idx)) });
        },
      ],
      draw: [
        (chart) => {
          drawBreaks(chart, latest.current.breaks ?? [], ink.mark);
          drawMarks(chart, lines, main);
        },
      ],
    },
  };
}

function count(values: ArrayLike<number | null | undefined>): number {
  return Array.from(values).filter((value) => value !== null && value !== undefined).length;
}

/** Room above and below; zero is in view where it is near. Numbers that are all equal have it too. */
function rangeOf(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : low > 0 ? [0, low * 1.25] : [low * 1.25, 0];
  const pad = (high - low) * 0.08;
  const near = (high - low) * 0.6;
  return [low >= 0 && low < near ? 0 : low - pad, high <= 0 && -high < near ? 0 : high + pad];
}

/** The value at `place`, or the one before where other lines have points between. */
function nearest(values: ArrayLike<number | null | undefined>, place: number): number | null {
  for (let at = place; at >= 0 && place - at < 50; at--) {
    const value = values[at];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

function drawBreaks(chart: uPlot, breaks: readonly number[], color: string): void {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = color;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const x of breaks) {
    const at = chart.valToPos(x, "x", true);
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** Pixels between the numbers of lines. */
const APART = 10;

/** The number of each line, behind its last point in view. */
function drawMarks(chart: uPlot, lines: readonly Line[], main: readonly number[]): void {
  const { ctx, bbox } = chart;
  const scale = devicePixelRatio;
  const marks = lines.flatMap((line, place) => {
    const end = line.mark ? endOf(chart, main[place]!) : null;
    return end ? [{ line, ...end }] : [];
  });
  marks.sort((one, other) => one.y - other.y);
  const heights = spread(
    marks.map(({ y }) => y),
    APART * scale,
    bbox.top + bbox.height,
  );
  ctx.save();
  ctx.font = `600 ${10 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  marks.forEach(({ line, x }, place) => {
    ctx.fillStyle = line.color;
    ctx.fillText(line.mark, x + 4 * scale, heights[place]!);
  });
  ctx.restore();
}

/** Where a series ends in view, in pixels of the canvas. */
function endOf(chart: uPlot, series: number): { x: number; y: number } | null {
  const values = chart.data[series]!;
  const [from, to] = chart.series[0]!.idxs ?? [0, values.length - 1];
  for (let at = to; at >= from; at--) {
    const value = values[at];
    if (value !== null && value !== undefined) return { x: chart.valToPos(chart.data[0][at]!, "x", true), y: chart.valToPos(value, "y", true) };
  }
  return null;
}
