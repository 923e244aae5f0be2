/** Curves of every metric, in groups; runs lie over each other. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { list, oneOf, within } from "./address";
import type { MetricNames, Run } from "./api";
import { Chart, type Line } from "./chart";
import { Choices, TextField } from "./controls";
import { type LoadedCurve, useCurves } from "./curve-loader";
import { useShortcuts } from "./keyboard";
import { type ChartPlan, chartsOf, groupsOf, LOOK_FIRST, matches, merged } from "./metric-groups";
import { adjust, href, query } from "./navigation";
import { Notice, Waiting } from "./notice";
import { compact, short } from "./number-format";
import { seriesColor } from "./palette";
import { useReply } from "./replies";
import { smooth } from "./smoothing";
import { theme } from "./theme";

export const AXES = [
  ["step", "step"],
  ["tokens", "tokens"],
  ["hours", "hours"],
] as const;
type XAxis = (typeof AXES)[number][0];

const POINTS_SMALL = 400;
const POINTS_LARGE = 2000;

/** How the curves are drawn: from the address. */
export interface Drawing {
  x: XAxis;
  weight: number;
  logarithmic: boolean;
}

export function drawingOf(): Drawing {
  const asked = query.value;
  return {
    x: oneOf(asked, "x", AXES.map(([axis]) => axis)),
    weight: within(asked, "smooth", 0, 0.99, 0),
    logarithmic: asked.y === "log",
  };
}

export function Curves({ runs }: { runs: readonly Run[] }) {
  const names = useMetricNames(runs);
  const filter = query.value.filter ?? "";
  const charts = useMemo(() => (names.metrics ? chartsOf(names.metrics) : undefined), [names.metrics]);
  const groups = useMemo(() => (charts ? groupsOf(charts.filter((chart) => matches(chart.name, filter))) : undefined), [charts, filter]);
  const open = query.value.metric;
  const chosen = open ? charts?.find((chart) => chart.name === open || chart.main === open) : undefined;
  if (open && charts) return chosen ? <MetricView plan={chosen} runs={runs} /> : <Notice>No metric {open} in this run. <a href={href("curves")}>All curves</a></Notice>;
  return (
    <>
      <Toolbar>
        <TextField label="Filter" main value={filter} placeholder="name, or /expression/" onChange={(value) => adjust({ filter: value }, { replace: true })} />
      </Toolbar>
      <RunLegend runs={runs} />
      {names.error ? <Notice problem>{names.error}</Notice> : null}
      {groups === undefined ? names.error ? null : <Waiting /> : null}
      {charts?.length === 0 ? <Notice>No metrics yet. They appear with the first step.</Notice> : null}
      {charts && charts.length > 0 && groups?.length === 0 ? <Notice>No metric matches “{filter}”.</Notice> : null}
      {groups?.map((group) => (
        <Group key={group.title} title={group.title} charts={group.charts} runs={runs} />
      ))}
    </>
  );
}

/** Which number is which run, where the list of runs is closed. */
function RunLegend({ runs }: { runs: readonly Run[] }) {
  if (runs.length < 2) return null;
  return (
    <p class="run-legend">
      {runs.map(({ id }, place) => (
        <span key={id}>
          <b style={{ color: seriesColor(place, theme.value) }}>{place + 1}</b> {id}{" "}
        </span>
      ))}
    </p>
  );
}

/** Metrics of all runs; asks again when a run has more. */
function useMetricNames(runs: readonly Run[]): { metrics: ReturnType<typeof merged> | undefined; error: string | null } {
  // Runs that are laid over mostly have the metrics of the first: more requests at once would only make the page late.
  const first = useReply<MetricNames>(runs[0] ? metricsOf(runs[0]) : null, { hold: true });
  const second = useReply<MetricNames>(runs[1] ? metricsOf(runs[1]) : null);
  const third = useReply<MetricNames>(runs[2] ? metricsOf(runs[2]) : null);
  const metrics = useMemo(() => {
    const replies = [first.data, second.data, third.data].filter((reply) => reply !== undefined);
    return replies.length > 0 ? merged(replies.map((reply) => reply.metrics)) : undefined;
  }, [first.data, second.data, third.data]);
  return { metrics, error: first.error };
}

function metricsOf(run: Run) {
  return { path: `/api/runs/${encodeURIComponent(run.id)}/metrics`, run: run.id, parts: ["metrics"] as const };
}

function Toolbar({ children }: { children?: preact.ComponentChildren }) {
  const { x, weight, logarithmic } = drawingOf();
  useShortcuts([
    { keys: "x", title: "next x axis", run: () => adjust({ x: AXES[(AXES.findIndex(([axis]) => axis === x) + 1) % AXES.length]![0] }, { replace: true }) },
    { keys: "s", title: "smooth more", run: () => adjust({ smooth: round(Math.min(0.95, weight + 0.2)) }, { replace: true }) },
    { keys: "S", title: "smooth less", run: () => adjust({ smooth: round(Math.max(0, weight - 0.2)) || null }, { replace: true }) },
    { keys: "l", title: "logarithmic y axis", run: () => adjust({ y: logarithmic ? null : "log" }, { replace: true }) },
  ]);
  return (
    <div class="toolbar">
      {children}
      <Choices label="x axis" choices={AXES} value={x} onChange={(axis) => adjust({ x: axis === "step" ? null : axis }, { replace: true })} />
      <label class="field">
        <span class="label">Smoothing</span>
        <input
          type="range"
          min="0"
          max="0.99"
          step="0.01"
          value={weight}
          aria-valuetext={short(weight)}
          onInput={(event) => adjust({ smooth: Number(event.currentTarget.value) || null }, { replace: true })}
        />
        <output class="quiet">{weight.toFixed(2)}</output>
      </label>
      <label class="check">
        <input type="checkbox" checked={logarithmic} onChange={() => adjust({ y: logarithmic ? null : "log" }, { replace: true })} /> log y
      </label>
    </div>
  );
}

function round(value: number): number {
  return Number(value.toFixed(2));
}

/** Groups whose charts are shown without a click; others open by one. */
const OPEN_GROUPS = [LOOK_FIRST, "eval", "rollout", "train"];

function Group({ title, charts, runs }: { title: string; charts: readonly ChartPlan[]; runs: readonly Run[] }) {
  const closed = list(query.value, "closed");
  const opened = list(query.value, "open");
  const filtered = !!query.value.filter;
  const byDefault = OPEN_GROUPS.includes(title) || filtered;
  const open = byDefault ? !closed.includes(title) : opened.includes(title);
  const toggle = (event: Event & { currentTarget: HTMLDetailsElement }) => {
    const next = event.currentTarget.open;
    if (next === open) return;
    const key = byDefault ? "closed" : "open";
    const names = byDefault ? closed : opened;
    adjust({ [key]: names.includes(title) ? names.filter((name) => name !== title).join(",") : [...names, title].join(",") }, { replace: true });
  };
  return (
    <details class="group" open={open} onToggle={toggle}>
      <summary>
        <h2>{title}</h2> <span class="quiet">{charts.length}</span>
      </summary>
      {open ? (
        <div class="charts">
          {charts.map((chart) => (
            <MetricChart key={chart.name} plan={chart} runs={runs} />
          ))}
        </div>
      ) : null}
    </details>
  );
}

/** x of a curve, on the axis that is asked for, or by step where the run does not know it. */
export function xOf(curve: LoadedCurve["curve"], axis: XAxis): { x: (number | null)[]; known: boolean } {
  const column = axis === "step" ? curve.step : curve[axis];
  return column ? { x: column, known: true } : { x: curve.step, known: axis === "step" };
}

/** Curves with fewer points, such as those of evaluations, are drawn as they are: an average would only lag behind. */
const FEW = 20;

/** Bands of more runs would hide each other. */
const BANDED_RUNS = 2;

/** Lines of one chart: of each run the metric, with the band of its distribution or of its buckets. */
export function linesOf(plan: Pick<ChartPlan, "main" | "median" | "low" | "high">, curves: readonly LoadedCurve[], runs: readonly Run[], drawing: Drawing, colors: "light" | "dark"): { lines: Line[]; breaks: number[]; unknown: boolean } {
  const lines: Line[] = [];
  const breaks: number[] = [];
  let unknown = false;
  runs.forEach((run, place) => {
    const of = (name: string | null) => curves.find((loaded) => loaded.run === run.id && loaded.name === name)?.curve;
    const curve = of(plan.main);
    if (!curve) return;
    const { x: all, known } = xOf(curve, drawing.x);
    unknown ||= !known;
    const kept = all.flatMap((x, at) => (x === null ? [] : [at]));
    const pick = (values: readonly (number | null)[]) => kept.map((at) => values[at] ?? null);
    const x = kept.map((at) => all[at]!);
    const mark = runs.length > 1 ? String(place + 1) : "";
    const color = seriesColor(place, colors);
    const title = runs.length > 1 ? run.id : "";
    const values = pick(curve.value);
    const weight = values.length < FEW ? 0 : drawing.weight;
    const low = of(plan.low)?.value ?? curve.low;
    const high = of(plan.high)?.value ?? curve.high;
    const banded = runs.length <= BANDED_RUNS && low !== null && high !== null && low.length === curve.step.length && high.length === curve.step.length;
    lines.push({
      title,
      color,
      mark,
      x,
      y: weight > 0 ? smooth(values, weight) : values,
      raw: weight > 0 ? values : undefined,
      low: banded ? pick(low) : undefined,
      high: banded ? pick(high) : undefined,
    });
    const median = of(plan.median);
    if (median && runs.length === 1 && median.step.length === curve.step.length) {
      const middle = pick(median.value);
      lines.push({ title: "median", color, mark: "", x, y: weight > 0 ? smooth(middle, weight) : middle, dashed: true });
    }
    if (place === 0) for (const at of curve.attempts) if (all[at] !== null && all[at] !== undefined) breaks.push(all[at]);
  });
  return { lines, breaks, unknown };
}

export function describe(name: string, lines: readonly Line[]): string {
  const parts = lines.map((line) => {
    const values = line.y.filter((value) => value !== null);
    if (values.length === 0) return `${line.title || name}: no numbers`;
    const least = values.reduce((one, other) => Math.min(one, other));
    const most = values.reduce((one, other) => Math.max(one, other));
    return `${line.title || name}: ${values.length} points, last ${short(values[values.length - 1])}, lowest ${short(least)}, highest ${short(most)}`;
  });
  return parts.join("; ") || `${name}: no points yet`;
}

/** True once the element has been near the window: charts further down ask for nothing. */
function useNear(): [{ current: HTMLElement | null }, boolean] {
  const element = useRef<HTMLElement | null>(null);
  const [near, setNear] = useState(false);
  useEffect(() => {
    if (near || !element.current) return;
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && setNear(true), { rootMargin: "400px" });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, [near]);
  return [element, near];
}

function namesOf(plan: ChartPlan): string[] {
  return [plan.main, plan.median, plan.low, plan.high].filter((name) => name !== null);
}

/** `above`: what a view calls it. */
export function MetricChart({ plan, runs, above }: { plan: ChartPlan; runs: readonly Run[]; above?: string }) {
  const [element, near] = useNear();
  const drawing = drawingOf();
  const { curves, error } = useCurves(runs.map((run) => run.id), namesOf(plan), POINTS_SMALL, near);
  const { lines, breaks, unknown } = useMemo(() => linesOf(plan, curves ?? [], runs, drawing, theme.value), [curves, runs, drawing.x, drawing.weight, theme.value, plan]);
  const [at, setAt] = useState<{ x: number; values: (number | null)[] } | null>(null);
  const asked = query.value;
  return (
    <figure class="metric" ref={element}>
      {above ? <p class="quiet">{above}</p> : null}
      <figcaption>
        <a href={href("curves", { ...kept(asked), metric: plan.name })} title={plan.meaning ?? undefined}>
          {plan.name}
        </a>
        <Values lines={lines} at={at} last={plan.last} />
      </figcaption>
      {error ? <Notice problem>{error}</Notice> : null}
      {curves && lines.length === 0 ? <Notice>No points in the chosen runs.</Notice> : null}
      {near && lines.length > 0 ? (
        <Chart
          lines={lines}
          breaks={breaks}
          xTitle={drawing.x}
          height={150}
          theme={theme.value}
          group={drawing.x === "step" ? plan.axis : drawing.x}
          logarithmic={drawing.logarithmic}
          label={describe(plan.name, lines)}
          onCursor={setAt}
        />
      ) : (
        <div class="chart-place" />
      )}
      {unknown ? <p class="quiet">{drawing.x} not known for this metric: by step</p> : null}
    </figure>
  );
}

/** What of the address a metric's own page takes along, and gives back. */
function kept(asked: Readonly<Record<string, string>>): Record<string, string | null> {
  return { x: asked.x ?? null, smooth: asked.smooth ?? null, y: asked.y ?? null, filter: asked.filter ?? null, open: asked.open ?? null, closed: asked.closed ?? null };
}

/** Beside the title of a small chart there is room for the numbers of so many runs. */
const FEW_RUNS = 3;

/** Numbers beside a chart's title: at the cursor, or the last ones. `whole`: of all runs, however many. */
function Values({ lines, at, last, whole = false }: { lines: readonly Line[]; at: { x: number; values: (number | null)[] } | null; last: number | null; whole?: boolean }) {
  if (lines.length <= 1 || (lines.length === 2 && lines[1]!.dashed)) {
    const end = lines[0]?.y.findLast((value) => value !== null) ?? last;
    return at ? (
      <span class="value">
        <span class="quiet">{compact(at.x)}</span> {short(at.values[0])}
      </span>
    ) : (
      <span class="value">{short(end)}</span>
    );
  }
  const numbers = lines.map((line, place) => (at ? (at.values[place] ?? null) : (line.y.findLast((value) => value !== null) ?? null)));
  if (!whole && lines.length > FEW_RUNS) {
    const known = numbers.filter((value) => value !== null);
    return (
      <span class="value">
        {at ? <span class="quiet">{compact(at.x)} </span> : null}
        {known.length === 0 ? "–" : `${short(Math.min(...known))} to ${short(Math.max(...known))}`}
      </span>
    );
  }
  return (
    <span class="value">
      {at ? <span class="quiet">{compact(at.x)}</span> : null}
      {lines.map((line, place) =>
        line.dashed ? null : (
          <span key={place} style={{ color: line.color }}>
            {" "}
            <b>{line.mark}</b> {short(numbers[place])}
          </span>
        ),
      )}
    </span>
  );
}

/** One metric, large, with its numbers as a table. */
function MetricView({ plan, runs }: { plan: ChartPlan; runs: readonly Run[] }) {
  const drawing = drawingOf();
  const { curves, error } = useCurves(runs.map((run) => run.id), namesOf(plan), POINTS_LARGE, true);
  const { lines, breaks, unknown } = useMemo(() => linesOf(plan, curves ?? [], runs, drawing, theme.value), [curves, runs, drawing.x, drawing.weight, theme.value, plan]);
  const [at, setAt] = useState<{ x: number; values: (number | null)[] } | null>(null);
  const back = href("curves", kept(query.value));
  useShortcuts([{ keys: "u", title: "all curves", run: () => (location.hash = back) }]);
  return (
    <>
      <Toolbar>
        <a href={back}>‹ all curves</a>
      </Toolbar>
      <figure class="metric large">
        <figcaption>
          <h2>{plan.name}</h2>
          <Values lines={lines} at={at} last={plan.last} whole />
        </figcaption>
        {plan.meaning ? <p class="quiet">{plan.meaning}</p> : null}
        {error ? <Notice problem>{error}</Notice> : null}
        {curves === undefined ? <Waiting /> : null}
        {lines.length > 0 ? (
          <Chart
            lines={lines}
            breaks={breaks}
            xTitle={drawing.x}
            height={420}
            theme={theme.value}
            group={drawing.x === "step" ? plan.axis : drawing.x}
            logarithmic={drawing.logarithmic}
            label={describe(plan.name, lines)}
            onCursor={setAt}
          />
        ) : null}
        <p class="quiet">
          {unknown ? `${drawing.x} not known for this metric: by step. ` : ""}
          x: {drawing.x === "step" ? plan.axis : drawing.x}. Drag to zoom, double-click for all.
          {breaks.length > 0 ? " A vertical line: the run was started again." : ""}
          {lines.some((line) => line.low) ? " The band lies between lowest and highest." : ""}
          {lines.some((line) => line.dashed) ? " The dashed line is the median." : ""}
        </p>
      </figure>
      {lines.length > 0 ? <NumbersTable lines={lines} x={drawing.x} /> : null}
    </>
  );
}

/** At most so many rows are shown as a table. */
const TABLE_ROWS = 200;

function NumbersTable({ lines, x }: { lines: readonly Line[]; x: string }) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((one, other) => one - other).slice(-TABLE_ROWS);
  const places = lines.map((line) => new Map(line.x.map((at, place) => [at, place])));
  return (
    <details class="group">
      <summary>
        <h2>Numbers</h2> <span class="quiet">the last {xs.length}</span>
      </summary>
      <div class="table" role="region" aria-label="Numbers of the curve" tabIndex={0}>
        <table class="narrow">
          <thead>
            <tr>
              <th scope="col" class="number">{x}</th>
              {lines.map((line, place) => (
                <th key={place} scope="col" class="number">{line.title || "value"}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {xs.toReversed().map((at) => (
              <tr key={at}>
                <td class="number">{compact(at)}</td>
                {lines.map((line, place) => (
                  <td key={place} class="number">{short(line.y[places[place]!.get(at) ?? -1] ?? null)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}
