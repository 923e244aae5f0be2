/** Ticks of a time axis, and sums over spans. */

import type { Timeline } from "./api";

const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400];

/** Seconds from `origin` at which ticks are, at most `count` of them in [start, end]. */
export function ticks(start: number, end: number, origin: number, count: number): number[] {
  const step = STEPS.find((candidate) => (end - start) / candidate <= count) ?? STEPS[STEPS.length - 1]!;
  const first = Math.ceil((start - origin) / step - 1e-9);
  const last = Math.floor((end - origin) / step + 1e-9);
  return Array.from({ length: Math.max(0, Math.min(last - first + 1, 500)) }, (_, place) => (first + place) * step);
}

/** `1:05:07`, `5:07`, `7.25 s`: time since the run began, as fine as `step` needs. */
export function clock(seconds: number, step: number): string {
  const sign = seconds < 0 ? "\u2212" : "";
  const size = Math.abs(seconds);
  if (step < 1) return `${sign}${size.toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : 1)} s`;
  const wholeSeconds = Math.round(size);
  const two = (part: number) => String(part).padStart(2, "0");
  const hours = Math.floor(wholeSeconds / 3600);
  const minutes = Math.floor((wholeSeconds % 3600) / 60);
  return hours > 0 ? `${sign}${hours}:${two(minutes)}:${two(wholeSeconds % 60)}` : `${sign}${minutes}:${two(wholeSeconds % 60)}`;
}

export interface LaneSums {
  name: string;
  devices: string | null;
  idle: number | null;
  /** Seconds of each kind within [start, end]. */
  seconds: Map<string, number>;
}

/** Of spans that lie over each other the inner one counts, so that the sums of a lane are at most the time in view. */
export function sumsOf(timeline: Timeline, start: number, end: number): LaneSums[] {
  return timeline.lanes.map((lane, place) => ({ ...lane, seconds: ownSeconds(spansOf(timeline, place, start, end)) }));
}

interface Piece {
  kind: string;
  from: number;
  to: number;
}

/** Those in view, cut to it; outer ones before inner ones. */
function spansOf(timeline: Timeline, lane: number, start: number, end: number): Piece[] {
  return timeline.lane
    .flatMap((of, span) => (of === lane ? [{ kind: timeline.kind[span]!, from: Math.max(timeline.from[span]!, start), to: Math.min(timeline.to[span]!, end) }] : []))
    .filter(({ from, to }) => to > from)
    .sort((one, other) => one.from - other.from || other.to - one.to);
}

function ownSeconds(spans: readonly Piece[]): Map<string, number> {
  const sums = new Map<string, number>();
  const open: Piece[] = [];
  let at = -Infinity;
  const pass = (until: number) => {
    for (let top = open.at(-1); top !== undefined && at < until; top = open.at(-1)) {
      const next = Math.min(top.to, until);
      if (next > at) {
        sums.set(top.kind, (sums.get(top.kind) ?? 0) + next - at);
        at = next;
      }
      if (top.to <= at) open.pop();
    }
    at = until;
  };
  for (const span of spans) {
    pass(span.from);
    open.push(span);
  }
  pass(Infinity);
  return sums;
}

export interface Rows {
  /** Of each span, from the top. */
  row: number[];
  /** How many rows its kind has in its lane. */
  rows: number[];
}

/** At most so many rollouts beside each other are told apart. */
const MOST_ROWS = 3;

/** Rows in which spans of one kind that overlap, such as rollouts that run ahead, lie below each other. */
export function rowsOf(timeline: Timeline): Rows {
  const row = timeline.lane.map(() => 0);
  const ends = new Map<string, number[]>();
  const order = timeline.from.map((_, span) => span).sort((one, other) => timeline.from[one]! - timeline.from[other]!);
  const key = (span: number) => `${timeline.lane[span]}/${timeline.kind[span]}`;
  for (const span of order) {
    const taken = ends.get(key(span)) ?? [];
    const free = taken.findIndex((end) => end <= timeline.from[span]! + CLOSE);
    const at = free >= 0 ? free : taken.length < MOST_ROWS ? taken.length : taken.indexOf(Math.min(...taken));
    taken[at] = timeline.to[span]!;
    ends.set(key(span), taken);
    row[span] = at;
  }
  return { row, rows: timeline.lane.map((_, span) => ends.get(key(span))!.length) };
}

/** Seconds by which clocks may differ. */
const CLOSE = 0.001;

/** The span of `lane` at this time, the shortest where several lie over each other; -1: none. `depth`: from 0 to 1 down the lane. */
export function spanAt(timeline: Timeline, lane: number, time: number, tolerance: number, depth = 0, { row, rows }: Rows = rowsOf(timeline)): number {
  let found = -1;
  let length = Infinity;
  timeline.lane.forEach((of, span) => {
    if (of !== lane || timeline.from[span]! - tolerance > time || timeline.to[span]! + tolerance < time) return;
    if (Math.min(Math.max(Math.floor(depth * rows[span]!), 0), rows[span]! - 1) !== row[span]) return;
    const seconds = timeline.to[span]! - timeline.from[span]!;
    if (seconds < length) {
      found = span;
      length = seconds;
    }
  });
  return found;
}
