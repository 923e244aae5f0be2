/** Sorting, filtering and search in the page, for exported files: what the server does with Parquet files otherwise. */

import type { Groups, Sample, Samples } from "./api";
import { ApiError } from "./client";

type Operator = "<=" | ">=" | "!=" | "<" | ">" | "=";
type Value = number | string | null;

export interface Condition {
  name: string;
  operator: Operator;
  value: string;
}

/** `reward<0.5 status=truncated`: conditions joined by spaces. Throws ApiError 400. */
export function parseConditions(text: string): Condition[] {
  return text
    .split(/\s+/)
    .filter((word) => word !== "")
    .map((word) => {
      const found = /^([^<>=!]+)(<=|>=|!=|<|>|=)(.+)$/s.exec(word);
      if (!found) throw new ApiError(400, `where: '${word}' is no condition; write NAME<VALUE, with one of <= >= != < > =.`);
      return { name: found[1]!, operator: found[2] as Operator, value: found[3]! };
    });
}

export function holds({ operator, value }: Condition, actual: Value): boolean {
  if (actual === null) return false;
  const [left, right] = typeof actual === "string" ? [actual, value] : [actual, Number(value)];
  switch (operator) {
    case "<":
      return left < right;
    case "<=":
      return left <= right;
    case ">":
      return left > right;
    case ">=":
      return left >= right;
    case "=":
      return left === right;
    case "!=":
      return left !== right;
  }
}

/** Words that all have to occur, in lower case; "in quotes": characters in this order. */
export function searchWords(text: string): string[] {
  return [...text.matchAll(/"([^"]*)"?|(\S+)/g)].map(([, quoted, plain]) => (quoted ?? plain ?? "").toLowerCase()).filter((word) => word !== "");
}

/** Rows in order of `column`, rows without a value last; equal rows are in falling order of `amongEqual`, or stay in theirs. */
export function sortedRows(rows: readonly number[], column: readonly Value[], descending: boolean, amongEqual?: readonly Value[]): number[] {
  return (amongEqual ? sortedRows(rows, amongEqual, true) : rows.map((row) => row)).toSorted((one, other) => {
    const left = column[one] ?? null;
    const right = column[other] ?? null;
    if (left === null || right === null) return left === right ? 0 : left === null ? 1 : -1;
    if (left === right) return 0;
    return (left < right ? -1 : 1) * (descending ? -1 : 1);
  });
}

/** The same reply with only these rows, in this order. */
export function rowsOf<Reply extends Groups | Samples>(reply: Reply, length: number, rows: readonly number[]): Reply {
  const pick = (value: unknown): unknown => {
    if (Array.isArray(value)) return value.length === length ? rows.map((row) => value[row] as unknown) : value;
    if (typeof value === "object" && value !== null) return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, pick(inner)]));
    return value;
  };
  return Object.fromEntries(Object.entries(reply).map(([name, value]) => [name, pick(value)])) as unknown as Reply;
}

export interface Query {
  sort: string;
  descending: boolean;
  q: string;
  where: string;
  offset: number;
  limit: number;
}

export function queryGroups(reply: Groups, query: Query): Groups {
  const columns: Record<string, readonly Value[]> = {
    group: reply.group,
    reward: reply.reward,
    lowest: reply.lowest,
    highest: reply.highest,
    spread: reply.spread,
    tokens: reply.tokens,
    longest: reply.longest,
    truncated: reply.truncated,
    version: reply.oldest,
    advantage: reply.advantage,
    mismatch: reply.mismatch,
    entropy: reply.entropy,
    ...prefixed("part:", reply.parts),
    ...prefixed("count:", reply.counts),
  };
  return cut(reply, reply.group.length, columns, query, (row, words) => words.every((word) => reply.prompt[row]!.toLowerCase().includes(word)));
}

/** `textOf`: prompt and response of a row, where they were exported. */
export function querySamples(reply: Samples, query: Query, scope: { step: number | null; group: number | null }, textOf: (row: number) => string | null): Samples {
  const columns: Record<string, readonly Value[]> = {
    step: reply.at.map(({ step }) => step),
    group: reply.group,
    index: reply.at.map(({ index }) => index),
    reward: reply.reward,
    tokens: reply.tokens,
    trained: reply.trained,
    status: reply.status,
    version: reply.oldest,
    log_prob: reply.log_prob,
    advantage: reply.advantage,
    mismatch: reply.mismatch,
    entropy: reply.entropy,
    ...prefixed("part:", reply.parts),
    ...prefixed("count:", reply.counts),
  };
  const found = (row: number, words: readonly string[]) => {
    const text = (textOf(row) ?? `${reply.prompt[row]}\n${reply.excerpt[row]}`).toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const inScope = (row: number) => (scope.step === null || reply.at[row]!.step === scope.step) && (scope.group === null || reply.group[row] === scope.group);
  const result = cut(reply, reply.at.length, columns, query, found, inScope, query.sort === "reward" ? reply.advantage : undefined);
  return { ...result, step: scope.step, exact: true, indexed: reply.rows, marks: result.excerpt.map((text) => places(text, searchWords(query.q))) };
}

function prefixed(prefix: string, columns: Readonly<Record<string, readonly Value[]>>): Record<string, readonly Value[]> {
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [prefix + name, values]));
}

function cut<Reply extends Groups | Samples>(
  reply: Reply,
  length: number,
  columns: Readonly<Record<string, readonly Value[]>>,
  query: Query,
  found: (row: number, words: readonly string[]) => boolean,
  inScope: (row: number) => boolean = () => true,
  amongEqual?: readonly Value[],
): Reply {
  const started = performance.now();
  const conditions = parseConditions(query.where);
  for (const name of [...conditions.map((condition) => condition.name), query.sort]) {
    if (!(name in columns)) throw new ApiError(400, `Nothing here is called '${name}'. There are: ${Object.keys(columns).sort().join(", ")}.`);
  }
  const words = searchWords(query.q);
  let rows = Array.from({ length }, (_, row) => row).filter(
    (row) => inScope(row) && conditions.every((condition) => holds(condition, columns[condition.name]![row] ?? null)) && (words.length === 0 || found(row, words)),
  );
  rows = sortedRows(rows, columns[query.sort]!, query.descending, amongEqual);
  const shown = rows.slice(query.offset, query.offset + query.limit);
  return { ...rowsOf(reply, length, shown), total: rows.length, offset: query.offset, took: performance.now() - started };
}

function places(text: string, words: readonly string[]): [number, number][] {
  const lower = text.toLowerCase();
  const found: [number, number][] = [];
  for (const word of words) for (let at = lower.indexOf(word); at >= 0; at = lower.indexOf(word, at + word.length)) found.push([at, at + word.length]);
  return found.sort(([one], [other]) => one - other);
}

/** All text of a sample in which a search looks. */
export function textOfSample(sample: Sample): string {
  const response = sample.tokens.text?.join("") ?? sample.turns.map((turn) => turn.text).join("");
  return `${sample.prompt.text}\n${response}`;
}
