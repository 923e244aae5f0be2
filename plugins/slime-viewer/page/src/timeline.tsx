/** What trainer and engines did when: spans of roles, waiting and idle shares, staleness. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Run, Timeline as TimelineReply } from "./api";
import { Chart, type Line } from "./chart";
import { describe } from "./curves";
import { useShortcuts } from "./keyboard";
import { adjust, href, query } from "./navigation";
import { Notice, Waiting } from "./notice";
import { duration, grouped, moment, percent } from "./number-format";
import { isStriped, kindColor, kindOrder, kindTitle, seriesColor } from "./palette";
import { useReply } from "./replies";
import { theme } from "./theme";
import { BAR, drawTimeline, HEAD, LANE_HEIGHT, leftOf } from "./timeline-drawing";
import { clock, rowsOf, spanAt, sumsOf } from "./timeline-scale";

export function Timeline({ run }: { run: Run }) {
  const asked = query.value;
  const start = timeOf(asked.start);
  const end = timeOf(asked.end);
  const range = start !== null && end !== null && start < end ? { start, end } : null;
  // A range that was chosen stays; the last steps move with a live run.
  const reply = useReply<TimelineReply>(
    { path: `/api/runs/${encodeURIComponent(run.id)}/timeline`, parameters: range ?? {}, run: run.id, parts: ["timeline"] },
    { hold: true },
  );
  if (reply.error && !reply.data) return <Notice problem>{reply.error}</Notice>;
  if (!reply.data) return <Waiting />;
  if (reply.data.lanes.length === 0) return <Notice>No times yet. They appear with the first step.</Notice>;
  const shown = range && range.start < reply.data.last && range.end > reply.data.first ? range : reply.data;
  const room = reply.data.last - reply.data.first + 1;
  return <TimelineView timeline={reply.data} start={Math.max(shown.start, reply.data.first - room)} end={Math.min(shown.end, reply.data.last + room)} />;
}

function timeOf(text: string | undefined): number | null {
  const value = Number(text ?? Number.NaN);
  return Number.isFinite(value) ? value : null;
}

function TimelineView({ timeline, start, end }: { timeline: TimelineReply; start: number; end: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [pointed, setPointed] = useState<{ span: number; x: number; y: number } | null>(null);
  const drag = useRef<{ x: number; start: number; end: number; moved: boolean } | null>(null);
  const left = leftOf(width);
  const height = HEAD + timeline.lanes.length * LANE_HEIGHT + 4;
  const kinds = useMemo(() => kindOrder(timeline.kind), [timeline]);
  const rows = useMemo(() => rowsOf(timeline), [timeline]);
  const sums = useMemo(() => sumsOf(timeline, start, end), [timeline, start, end]);

  const show = (from: number, to: number, replace: boolean) => {
    const least = 0.02;
    const length = Math.max(least, Math.min(to - from, (timeline.last - timeline.first) * 1.02 || least));
    const middle = (from + to) / 2;
    const low = Math.max(timeline.first - length * 0.02, Math.min(middle - length / 2, timeline.last - length * 0.98));
    adjust({ start: low.toFixed(3), end: (low + length).toFixed(3) }, { replace });
  };
  const zoom = (factor: number, at = (start + end) / 2) => show(at - (at - start) * factor, at + (end - at) * factor, true);
  const pan = (share: number) => show(start + (end - start) * share, end + (end - start) * share, true);
  const everything = () => adjust({ start: timeline.first.toFixed(3), end: timeline.last.toFixed(3) });
  const timeAt = (x: number) => start + ((x - left) / (width - left)) * (end - start);

  useShortcuts([
    { keys: "+", title: "zoom in", run: () => zoom(0.5) },
    { keys: "-", title: "zoom out", run: () => zoom(2) },
    { keys: "ArrowLeft", title: "earlier", run: () => pan(-0.25) },
    { keys: "ArrowRight", title: "later", run: () => pan(0.25) },
    { keys: "a", title: "the whole run", run: everything },
    { keys: "z", title: "the last steps", run: () => adjust({ start: null, end: null }) },
  ]);

  useEffect(() => {
    const element = canvas.current!;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (width > 0) drawTimeline(canvas.current!, { timeline, rows, start, end, width, height, theme: theme.value, pointed: pointed?.span ?? -1 });
  }, [timeline, start, end, width, height, theme.value, pointed?.span]);

  // The wheel zooms with Ctrl, as in maps: without it the page scrolls. Preact's listeners are passive there.
  const zoomed = useRef(zoom);
  zoomed.current = zoom;
  const atX = useRef(timeAt);
  atX.current = timeAt;
  useEffect(() => {
    const element = canvas.current!;
    const wheel = (event: WheelEvent) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomed.current(event.deltaY > 0 ? 1.25 : 0.8, atX.current(event.offsetX));
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, []);

  const point = (event: PointerEvent) => {
    if (drag.current) {
      const shift = ((drag.current.x - event.offsetX) / (width - left)) * (drag.current.end - drag.current.start);
      if (Math.abs(drag.current.x - event.offsetX) > 3) drag.current.moved = true;
      if (drag.current.moved) show(drag.current.start + shift, drag.current.end + shift, true);
      return;
    }
    const lane = Math.floor((event.offsetY - HEAD) / LANE_HEIGHT);
    const depth = (event.offsetY - HEAD - lane * LANE_HEIGHT - (LANE_HEIGHT - BAR) / 2) / BAR;
    const span = event.offsetX < left ? -1 : spanAt(timeline, lane, timeAt(event.offsetX), ((end - start) / (width - left)) * 2, depth, rows);
    setPointed(span < 0 ? null : { span, x: event.offsetX, y: HEAD + (lane + 1) * LANE_HEIGHT });
  };

  return (
    <>
      <div class="toolbar">
        <div class="choices" role="group" aria-label="Range of time">
          <button type="button" aria-label="Earlier" onClick={() => pan(-0.5)}>‹</button>
          <button type="button" aria-label="Later" onClick={() => pan(0.5)}>›</button>
          <button type="button" aria-label="Zoom in" onClick={() => zoom(0.5)}>+</button>
          <button type="button" aria-label="Zoom out" onClick={() => zoom(2)}>−</button>
          <button type="button" onClick={everything}>whole run</button>
          <button type="button" onClick={() => adjust({ start: null, end: null })}>last steps</button>
        </div>
        <span class="quiet">
          {moment(start)}, {duration(end - start)}
        </span>
      </div>
      {timeline.source === "estimated" ? <Notice>Estimated: the seconds of metrics.jsonl laid end to end. What ran at the same time is not known.</Notice> : null}
      <ul class="kinds" aria-label="Kinds of spans">
        {kinds.map((kind) => (
          <li key={kind}>
            <span class={isStriped(kind) ? "kind striped" : "kind"} style={{ backgroundColor: kindColor(kind, theme.value) }} />
            {kindTitle(kind)}
          </li>
        ))}
      </ul>
      <div class="timeline">
        <canvas
          ref={canvas}
          style={{ height: `${height}px` }}
          role="img"
          aria-label={`Timeline of ${timeline.lanes.map(({ name }) => name).join(", ")}; the table below has its sums`}
          onPointerDown={(event) => {
            drag.current = { x: event.offsetX, start, end, moved: false };
            event.currentTarget.setPointerCapture(event.pointerId);
            setPointed(null);
          }}
          onPointerMove={point}
          onPointerUp={() => (drag.current = null)}
          onPointerCancel={() => (drag.current = null)}
          onPointerLeave={() => setPointed(null)}
          onDblClick={(event) => zoom(0.4, timeAt(event.offsetX))}
        />
        {pointed && pointed.span < timeline.kind.length ? <SpanCard timeline={timeline} {...pointed} width={width} /> : null}
      </div>
      <Shares sums={sums} kinds={kinds} seconds={end - start} />
      <Marks timeline={timeline} />
      <div class="charts">
        <StepCurves timeline={timeline} />
        <Memory timeline={timeline} />
      </div>
    </>
  );
}

function SpanCard({ timeline, span, x, y, width }: { timeline: TimelineReply; span: number; x: number; y: number; width: number }) {
  const step = timeline.step[span];
  const from = timeline.from[span]!;
  const to = timeline.to[span]!;
  return (
    <div class="card" role="tooltip" style={{ position: "absolute", left: `${Math.max(4, Math.min(x, width - 220))}px`, top: `${y + 4}px` }}>
      <p>
        <b>{kindTitle(timeline.kind[span]!)}</b> {timeline.lanes[timeline.lane[span]!]?.name}
      </p>
      <dl>
        <div><dt>duration</dt><dd>{duration(to - from)}</dd></div>
        <div><dt>from</dt><dd>{moment(from)}</dd></div>
        {step !== null && step !== undefined ? <div><dt>step</dt><dd>{grouped(step)}</dd></div> : null}
      </dl>
    </div>
  );
}

function Shares({ sums, kinds, seconds }: { sums: ReturnType<typeof sumsOf>; kinds: readonly string[]; seconds: number }) {
  return (
    <div class="table" role="region" aria-label="Seconds of each kind" tabIndex={0}>
      <table class="narrow">
        <thead>
          <tr>
            <th scope="col" class="text">in view</th>
            <th scope="col" class="number">idle</th>
            {kinds.map((kind) => (
              <th key={kind} scope="col" class="number">{kindTitle(kind)}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {sums.map((lane) => (
            <tr key={lane.name}>
              <th scope="row" class="text">
                {lane.name} {lane.devices ? <span class="quiet">{lane.devices}</span> : null}
              </th>
              <td class="number">{percent(lane.idle)}</td>
              {kinds.map((kind) => {
                const sum = lane.seconds.get(kind);
                return (
                  <td key={kind} class="number">
                    {sum === undefined ? "" : duration(sum)} {sum === undefined ? null : <span class="quiet">{percent(sum / seconds)}</span>}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Marks({ timeline }: { timeline: TimelineReply }) {
  if (timeline.marks.length === 0) return null;
  return (
    <details class="group">
      <summary>
        <h2>Events in view</h2> <span class="quiet">{timeline.marks.length}</span>
      </summary>
      <ul class="plain">
        {timeline.marks.map(({ time, text }, place) => (
          <li key={place}>
            <button type="button" class="link" onClick={() => adjust({ start: (time - 30).toFixed(3), end: (time + 30).toFixed(3) })}>
              {moment(time)}
            </button>{" "}
            {text}
          </li>
        ))}
      </ul>
    </details>
  );
}

function StepCurves({ timeline }: { timeline: TimelineReply }) {
  const { step, staleness_mean, staleness_max, wait_ratio } = timeline.steps;
  const color = seriesColor(0, theme.value);
  const staleness = useMemo(
    () =>
      staleness_mean.some((value) => value !== null)
        ? [
            { title: "mean", color, mark: "", x: step, y: staleness_mean },
            { title: "largest", color, mark: "", x: step, y: staleness_max, dashed: true },
          ]
        : [],
    [timeline, color],
  );
  const waiting = useMemo(() => (wait_ratio.some((value) => value !== null) ? [{ title: "wait", color: seriesColor(1, theme.value), mark: "", x: step, y: wait_ratio }] : []), [timeline, theme.value]);
  return (
    <>
      {staleness.length > 0 ? (
        <figure class="metric">
          <figcaption>
            <a href={href("curves", { metric: "rollout/staleness/mean" })}>staleness</a> <span class="quiet">policy versions: mean, largest dashed</span>
          </figcaption>
          <Chart lines={staleness} xTitle="step" height={140} theme={theme.value} group="timeline" label={describe("staleness", staleness)} />
        </figure>
      ) : null}
      {waiting.length > 0 ? (
        <figure class="metric">
          <figcaption>
            <a href={href("curves", { metric: "perf/wait_time_ratio" })}>share of the step in which the trainer waited</a>
          </figcaption>
          <Chart lines={waiting} xTitle="step" height={140} theme={theme.value} group="timeline" label={describe("share of waiting", waiting)} />
        </figure>
      ) : null}
    </>
  );
}

const GIB = 2 ** 30;

/** Memory in use over time: a chart of the GPUs with what they have, one of the host. */
function Memory({ timeline }: { timeline: TimelineReply }) {
  const { time, what, used, limit } = timeline.memory;
  const charts = useMemo(() => {
    const x = time.map((at) => at - timeline.first);
    const gpus = what.filter((name) => name !== HOST);
    const line = (name: string): Line => {
      const place = gpus.indexOf(name);
      return {
        title: name,
        color: seriesColor(Math.max(place, 0), theme.value),
        mark: gpus.length > 1 && name !== HOST ? name.replace(/^GPU /, "") : "",
        x,
        y: used[what.indexOf(name)]!.map((bytes) => (bytes === null ? null : bytes / GIB)),
      };
    };
    const most = Math.max(...gpus.map((name) => limit[what.indexOf(name)]!)) / GIB;
    const whole: Line = { title: "what a GPU has", color: seriesColor(6, theme.value), mark: "", x, y: x.map(() => most), dashed: true };
    return [
      { title: "GPU memory", hint: "GiB; dashed: all of it", lines: gpus.length > 0 ? [...gpus.map(line), whole] : [] },
      { title: "host memory", hint: "GiB of the run's processes", lines: what.includes(HOST) ? [line(HOST)] : [] },
    ];
  }, [timeline, theme.value]);
  if (time.length < 2) return null;
  const step = (time[time.length - 1]! - time[0]!) / 8;
  return (
    <>
      {charts.map(({ title, hint, lines }) =>
        lines.length > 0 ? (
          <figure key={title} class="metric">
            <figcaption>
              {title} <span class="quiet">{hint}</span>
            </figcaption>
            <Chart lines={lines} xTitle="time" height={140} theme={theme.value} group="memory" label={describe(title, lines)} xText={(seconds) => clock(seconds, step)} />
          </figure>
        ) : null,
      )}
    </>
  );
}

const HOST = "host";
