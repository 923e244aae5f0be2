/** Metrics as charts: `name/mean`, `/median`, `/max` and `/min` are one chart, charts are grouped by prefix. */

import type { MetricNames } from "./api";

export type Metric = MetricNames["metrics"][number];

/** One chart: a metric, or the numbers of one distribution. */
export interface ChartPlan {
  /** Name of the metric, without `/mean` where it is a distribution. */
  name: string;
  axis: string;
  meaning: string | null;
  /** The line that is drawn first, and from which title and last value come. */
  main: string;
  last: number | null;
  /** Other lines of a distribution. */
  median: string | null;
  low: string | null;
  high: string | null;
}

export interface ChartGroup {
  title: string;
  charts: ChartPlan[];
}

const PARTS = ["mean", "median", "max", "min"];

/** What docs/watching.md names under "Look at these first", as far as the run has them. */
const FIRST = [
  /^rollout\/raw_reward$/,
  /^eval\/(?!version_)[^/]+(?<!-truncated_ratio)$/,
  /^rollout\/truncated_ratio$/,
  /^rollout\/response_len$/,
  /^train\/grad_norm$/,
  /^rollout\/zero_std\/frac$/,
  /^train\/ppo_kl$/,
  /^train\/pg_clipfrac$/,
  /^rollout\/entropy$/,
  /^train\/train_rollout_logprob_abs_diff$/,
  /^perf\/rollout_time$/,
  /^perf\/train_time$/,
  /^perf\/wait_time_ratio$/,
];

export const LOOK_FIRST = "look first";

/** One chart for each metric or distribution, in the order of their names. */
export function chartsOf(metrics: readonly Metric[]): ChartPlan[] {
  const byName = new Map(metrics.map((metric) => [metric.name, metric]));
  const charts: ChartPlan[] = [];
  for (const metric of metrics) {
    const cut = metric.name.lastIndexOf("/");
    const stem = metric.name.slice(0, cut);
    const part = metric.name.slice(cut + 1);
    const distribution = PARTS.includes(part) && byName.has(`${stem}/mean`) && (byName.has(`${stem}/max`) || byName.has(`${stem}/min`));
    if (!distribution) {
      charts.push({ name: metric.name, axis: metric.axis, meaning: metric.meaning, main: metric.name, last: metric.last, median: null, low: null, high: null });
    } else if (part === "mean") {
      const there = (name: string) => (byName.has(`${stem}/${name}`) ? `${stem}/${name}` : null);
      charts.push({ name: stem, axis: metric.axis, meaning: metric.meaning, main: metric.name, last: metric.last, median: there("median"), low: there("min"), high: there("max") });
    }
  }
  return charts.sort((one, other) => (one.name < other.name ? -1 : one.name > other.name ? 1 : 0));
}

/** By the first part of the name; before them what is worth a look first. */
export function groupsOf(charts: readonly ChartPlan[]): ChartGroup[] {
  const first = FIRST.flatMap((pattern) => charts.filter((chart) => pattern.test(chart.name)));
  const groups = new Map<string, ChartPlan[]>();
  for (const chart of charts) {
    const prefix = chart.name.split("/", 1)[0]!;
    groups.set(prefix, [...(groups.get(prefix) ?? []), chart]);
  }
  const rest = [...groups].map(([title, members]) => ({ title, charts: members }));
  return first.length > 0 ? [{ title: LOOK_FIRST, charts: first }, ...rest] : rest;
}

/** Words that all occur in the name, in any case; a text between slashes is a regular expression. */
export function matches(name: string, filter: string): boolean {
  const text = filter.trim();
  const expression = /^\/(.+)\/$/.exec(text);
  if (expression) {
    try {
      return new RegExp(expression[1]!, "i").test(name);
    } catch {
      return false;
    }
  }
  const lower = name.toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => lower.includes(word));
}

/** Metrics of all runs, each once; the first run that has one gives its meaning and last value. */
export function merged(lists: readonly (readonly Metric[])[]): Metric[] {
  const all = new Map<string, Metric>();
  for (const metrics of lists) for (const metric of metrics) if (!all.has(metric.name)) all.set(metric.name, metric);
  return [...all.values()];
}
