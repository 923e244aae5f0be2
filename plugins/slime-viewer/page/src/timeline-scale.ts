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

export function sumsOf(timeline: Timeline, start: number, end: number): LaneSums[] {
  const sums: LaneSums[] = timeline.lanes.map((lane) => ({ ...lane, seconds: new Map() }));
  timeline.lane.forEach((lane, span) => {
    const seconds = Math.min(timeline.to[span]!, end) - Math.max(timeline.from[span]!, start);
    const sum = sums[lane];
    if (sum && seconds > 0) sum.seconds.set(timeline.kind[span]!, (sum.seconds.get(timeline.kind[span]!) ?? 0) + seconds);
  });
  return sums;
}

/** The span of `lane` at this time, the shortest where several lie over each other; -1: none. */
export function spanAt(timeline: Timeline, lane: number, time: number, tolerance: number): number {
  let found = -1;
  let length = Infinity;
  timeline.lane.forEach((of, span) => {
    if (of !== lane || timeline.from[span]! - tolerance > time || timeline.to[span]! + tolerance < time) return;
    const seconds = timeline.to[span]! - timeline.from[span]!;
    if (seconds < length) {
      found = span;
      length = seconds;
    }
  });
  return found;
}
