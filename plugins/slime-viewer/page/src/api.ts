/**
 * The JSON API of `slime view`.
 *
 * Every request is a GET and has the header `Authorization: Bearer TOKEN`; the address that `slime view` prints is
 * `http://127.0.0.1:PORT/#token=TOKEN`. Only the bundle (`/`, `/assets/*`) and the modules of panels (`/panels/NAME.js`) are served
 * without it: they hold nothing of a run. Parameters that are left out have the default that is named here. A list in a parameter is
 * separated by commas. Errors are `{ error: string }` with status 400 (a parameter), 401 (no token), 404 (no such run, step, sample) or
 * 422 (the file is there and cannot be read); `error` is a sentence for the user.
 *
 * NaN and infinities are `null` in JSON. Times are seconds since the epoch (UTC) unless a name says otherwise. Curves, tables and
 * tokens come as columns: arrays of equal length.
 */

/** Arrays of equal length by name. */
export type Numbers = (number | null)[];

// ---------------------------------------------------------------- GET /api/runs

/**
 * `running`: a process holds the folder. `finished`: summary.json is there. `stopped`: neither, and it may continue. `failed`: the last
 * attempt ended with an error. `empty`: a folder without a run. `broken`: a file is there and cannot be read; `problem` names it.
 */
export type RunState = "running" | "finished" | "stopped" | "failed" | "empty" | "broken";

export interface Run {
  /** In addresses: the folder's name, with `~2` and so on where two are equal. */
  id: string;
  name: string;
  folder: string;
  state: RunState;
  /** A sentence, or null. */
  problem: string | null;
  started: number | null;
  /** Of the newest line of any file. */
  changed: number | null;
  attempts: number;
  /** Rollout steps that were trained, and how many the config asks for. */
  steps: number;
  num_rollout: number | null;
  /** Mean of the last steps. */
  step_seconds: number | null;
  /** Parts that have data. */
  has: { metrics: boolean; samples: boolean; tokens: boolean; evals: boolean; timeline: boolean; events: boolean };
}

export interface Runs {
  /** Version of slime-viewer. */
  version: string;
  runs: Run[];
  panels: PanelInfo[];
  /** True in an exported file: nothing changes any more, and only what was exported is there. */
  exported: boolean;
}

// ---------------------------------------------------------------- GET /api/changes?cursor=TEXT   (poll every 2 s; without a cursor: the first one)

/** What a reply of that name would say anew: `run` stands for an entry of `/api/runs`. */
export type Part = "run" | "metrics" | "samples" | "evals" | "timeline" | "events";

export interface Changes {
  cursor: string;
  changed: { run: string; parts: Part[] }[];
}

// ---------------------------------------------------------------- GET /api/runs/{id}/config

export interface Config {
  /** Keys as in the run file, such as `train.lr`. Values are JSON. */
  values: Record<string, unknown>;
  plugins: Record<string, string>;
  libraries: Record<string, string>;
  slime: string | null;
  python: string | null;
}

// GET /api/config-difference?runs=a,b,...   Keys whose values are not the same in all of these runs.
export interface ConfigDifference {
  runs: string[];
  keys: string[];
  /** values[key][run]; `undefined` in no run's config is `null` with `there[key][run] === false`. */
  values: unknown[][];
  there: boolean[][];
}

// ---------------------------------------------------------------- GET /api/runs/{id}/metrics   The names.

export type Axis = "train/step" | "rollout/step" | "eval/step" | (string & {});

export interface MetricNames {
  /** Metrics of each axis, in the order of their names, with the last value. `meaning` is a line of the reference, or null. */
  metrics: { name: string; axis: Axis; last: number | null; points: number; meaning: string | null }[];
}

// GET /api/runs/{id}/series?names=a,b,...&points=2000   Repeat for each run that is laid over.
export interface Series {
  series: Record<string, Curve>;
}

/**
 * One metric. If it has more rows than `points`, each entry is a bucket of consecutive rows: `value` its mean, `low` and `high` its
 * extremes (null otherwise), and x its last row.
 */
export interface Curve {
  axis: Axis;
  step: number[];
  /** Tokens trained until then (prompts included), where `perf/train_tokens` is known. */
  tokens: Numbers | null;
  /** Hours of the loop until then, pauses between attempts left out. */
  hours: Numbers | null;
  value: Numbers;
  low: Numbers | null;
  high: Numbers | null;
  /** Places in `step` at which another attempt of the run begins. */
  attempts: number[];
}

// ---------------------------------------------------------------- GET /api/compare?runs=a,b,...   What `slime compare` prints.

export interface Compare {
  runs: string[];
  /** `kind`: how to print the values. `better`: which is marked; null: none. */
  rows: {
    section: string;
    name: string;
    kind: "number" | "share" | "seconds" | "count" | "text" | "time";
    better: "high" | "low" | null;
    values: (number | string | null)[];
  }[];
}

// ---------------------------------------------------------------- GET /api/runs/{id}/steps?set=train

/** `set` is `train` or the name of an evaluation set. Steps of evaluations are those of the axis `eval/step`. */
export interface Steps {
  /** All sets that have samples, `train` first. */
  sets: string[];
  set: string;
  step: number[];
  samples: number[];
  groups: number[];
  /** Mean reward, null without one. */
  reward: Numbers;
  /** Steps whose file cannot be read, with the reason. */
  unreadable: { step: number; problem: string }[];
  /** Names of reward parts and counts that can be sorted by (`part:NAME`, `count:NAME`). */
  parts: string[];
  counts: string[];
}

// ---------------------------------------------------------------- GET /api/runs/{id}/groups
// ?set=train&step=last|N&sort=group|reward|lowest|highest|spread|tokens|longest|truncated|version|advantage|mismatch|entropy|part:NAME|count:NAME
// &descending=0|1&q=TEXT&where=FILTER&offset=0&limit=100      `sort=group` by default.

export interface Groups {
  set: string;
  step: number;
  total: number;
  offset: number;
  /** Milliseconds on the server. */
  took: number;
  group: number[];
  /** Start of the last message of the prompt, or of its text; at most 300 characters. */
  prompt: string[];
  samples: number[];
  reward: Numbers;
  lowest: Numbers;
  highest: Numbers;
  /** Standard deviation of the rewards in the group. */
  spread: Numbers;
  tokens: Numbers;
  longest: number[];
  truncated: number[];
  /** Oldest and newest policy version of the tokens. */
  oldest: Numbers;
  newest: Numbers;
  /** Means over trained tokens, null where unknown: absolute advantage, absolute difference of log-probs, entropy. */
  advantage: Numbers;
  mismatch: Numbers;
  entropy: Numbers;
  /** Means over samples. */
  parts: Record<string, Numbers>;
  counts: Record<string, Numbers>;
}

// ---------------------------------------------------------------- GET /api/runs/{id}/samples
// ?set=train&step=all|last|N&group=N (only this group)&sort=step|group|index|reward|tokens|version|log_prob|advantage|mismatch|entropy|part:NAME|count:NAME
// &descending=0|1&q=TEXT&where=FILTER&offset=0&limit=100      `sort=step` by default. The worst of a step: sort=reward&limit=1;
// of equal rewards the one with the largest advantages is first.
//
// q: words that all occur in prompt or response, in any case; "in quotes": these characters in this order.
// where: conditions joined by spaces: reward<0.5 tokens>=100 status=truncated step=4 group=12 version=3 part:format=0 failed:... Unknown
// names are an error 400 that lists the known ones.

export interface Samples {
  set: string;
  /** Null: of all steps. */
  step: number | null;
  total: number;
  /** False: `total` is an estimate ("about"), since counting a frequent word would read too many texts. */
  exact: boolean;
  offset: number;
  took: number;
  /** Rows that the search index holds so far, and rows there are: below, results are of what is indexed. Equal: complete. */
  indexed: number;
  rows: number;
  at: SampleKey[];
  group: number[];
  prompt: string[];
  /** At most 300 characters of the response: around the first place of q, else its start. */
  excerpt: string[];
  /** [start, end) in the excerpt of each place of q, in UTF-16 units as JavaScript counts. */
  marks: [number, number][][];
  reward: Numbers;
  tokens: number[];
  trained: number[];
  status: string[];
  oldest: Numbers;
  newest: Numbers;
  log_prob: Numbers;
  advantage: Numbers;
  mismatch: Numbers;
  entropy: Numbers;
  parts: Record<string, Numbers>;
  counts: Record<string, Numbers>;
}

/** `part`: 0, and more where one episode gave several samples with the same index. */
export interface SampleKey {
  step: number;
  index: number;
  part: number;
}

// ---------------------------------------------------------------- GET /api/runs/{id}/sample?set=train&step=N|last&index=N&part=0
// Without step: the newest that has the index.

export interface Sample {
  set: string;
  at: SampleKey;
  group: number;
  origin: string;
  label: unknown;
  metadata: unknown;
  status: string;
  reward: number | null;
  /** Named numbers of the reward. */
  parts: Record<string, number>;
  counts: Record<string, number>;
  /** False: counted in its group, trains nothing. */
  trains: boolean;
  prompt: { text: string; messages: Message[] | null; tools: unknown[] | null; tokens: number; images: number };
  /** Consecutive pieces of the response. */
  turns: Turn[];
  tokens: Tokens;
  /** All samples of the group, this one included, in their order. */
  siblings: { at: SampleKey; reward: number | null; tokens: number; status: string }[];
  /** Rewards of spans of the response, in token places. */
  span_rewards: { start: number; end: number; value: number }[];
  /** Calls of the engine, where the run traced them. */
  calls: Call[] | null;
}

export interface Message {
  role: string;
  /** As in the data: text, or a list of parts. */
  content: unknown;
  [more: string]: unknown;
}

/** Tokens [start, end) of the response, all of the policy or all of the environment (a tool, a user). */
export interface Turn {
  start: number;
  end: number;
  by: "policy" | "environment";
  /** Null for the environment. */
  version: number | null;
  text: string;
}

/**
 * Response tokens. `text` has the piece of text of each token; joined they are the response with special tokens. A character that several
 * tokens make together is in the last of them, the others are "". `text` is null where no tokenizer was found: `problem` says why, and
 * turns' texts then come from the dump if there is only one turn.
 */
export interface Tokens {
  ids: number[];
  text: string[] | null;
  problem: string | null;
  columns: TokenColumn[];
}

/** `name` is one of the names below; the values are null where a token has none (of the environment, for log-probs). */
export interface TokenColumn {
  name:
    | "advantage"
    | "log_prob" // of the trainer, before the step
    | "rollout_log_prob" // of the engine
    | "mismatch" // log_prob - rollout_log_prob
    | "entropy"
    | "ref_log_prob"
    | "teacher_log_prob"
    | "value"
    | "return"
    | "loss_weight"
    | "mask" // 1: trained
    | "version"
    | (string & {});
  /** A few words for the list and the legend. */
  title: string;
  /** diverging: around 0. sequential: from the least to the most. category: equal numbers, equal colours. */
  scale: "diverging" | "sequential" | "category";
  values: Numbers;
}

export interface Call {
  queue: number;
  generate: number;
  prompt_tokens: number;
  cached_tokens: number;
  tokens: number;
  engine: number;
  finish: string;
}

// ---------------------------------------------------------------- GET /api/runs/{id}/timeline?start=T&end=T&spans=5000   (default: the last 20 steps)

export interface Timeline {
  /** recorded: by slime-viewer during the run. estimated: from the seconds in metrics.jsonl, laid end to end. */
  source: "recorded" | "estimated";
  /** First and last second there are; the spans below lie in [start, end]. */
  first: number;
  last: number;
  start: number;
  end: number;
  /** Rows from top to bottom: `devices` (those that trainer and engines share), `engines`, `trainer`, `trainer: critic`, with devices where known. */
  lanes: { name: string; devices: string | null; idle: number | null }[];
  lane: number[];
  /** rollout, score, train, weights, sleep, wake, wait, eval, save; of a start driver, imports, load, graphs. Spans lie over longer ones of their lane: the inner one is what was done. */
  kind: string[];
  from: number[];
  to: number[];
  step: Numbers;
  /** Instants: an attempt began, an engine was lost, ... */
  marks: { time: number; text: string }[];
  /** Of each rollout step in view. */
  steps: { step: number[]; staleness_mean: Numbers; staleness_max: Numbers; wait_ratio: Numbers };
  /** Bytes in use, of the GPUs of the driver's machine and of the run's processes there: `used[what][time]`. `limit`: bytes there are. */
  memory: { time: number[]; what: string[]; used: Numbers[]; limit: number[] };
}

// ---------------------------------------------------------------- GET /api/runs/{id}/health

export interface Health {
  /** Most serious first. `metric` can be drawn; `step` is where to look. */
  findings: { level: "serious" | "notice"; text: string; metric: string | null; step: number | null }[];
  /** Metrics to draw, in this order, as far as the run has them. */
  charts: { title: string; metrics: string[] }[];
  /** Bytes for each device or host; null: not known. */
  memory: { what: string; planned: number | null; measured: number | null; limit: number | null }[];
  /** Why a column of `memory` is empty, or null. */
  memory_note: string | null;
  skipped_steps: number;
  failed_samples: number;
  engines_lost: number;
}

// GET /api/runs/{id}/events?offset=0&limit=200   Newest first.
export interface Events {
  total: number;
  offset: number;
  time: number[];
  attempt: number[];
  event: string[];
  /** A sentence. */
  text: string[];
  step: Numbers;
}

// ---------------------------------------------------------------- Panels

/** A panel that a plugin brings. */
export interface PanelInfo {
  name: string;
  title: string;
  /** `dist version`. */
  from: string;
}

// GET /api/runs/{id}/panels/{name} gives whatever JSON the plugin's function returns, as { data }.
export interface PanelData {
  data: unknown;
}

/**
 * GET /panels/{name}.js is an ES module. It draws into an empty element, and may return a function that is called before the element is
 * emptied. It is called again with new data while a run continues.
 */
export interface PanelModule {
  default(element: HTMLElement, data: unknown): void | (() => void);
}

// ---------------------------------------------------------------- The exported file

/**
 * `slime view --export run.html` writes the bundle with this object as JSON in `<script type="application/json" id="slime-export">`
 * (`<` escaped as \u003c). `replies` maps a path with its parameters, sorted by name and without defaults, to the reply, for example
 * `/api/runs` and `/api/runs/demo/groups?step=3`. `table` rows that are not there under their parameters are cut and sorted by the page
 * from the reply of the step without parameters. Samples are there under `/api/runs/ID/sample?index=7&step=3` for the samples
 * that `/api/runs/ID/samples?limit=100000` lists. Modules of panels are in `modules` by name.
 */
export interface Exported {
  replies: Record<string, unknown>;
  modules: Record<string, string>;
}
