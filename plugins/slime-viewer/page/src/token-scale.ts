/** Which class a token has for its number: `d0` to `d8` around zero (d4), `s0` to `s6` from the least to the most, `c0` to `c5` for kinds. */

import type { TokenColumn } from "./api";

export const DIVERGING_STEPS = 9;
export const SEQUENTIAL_STEPS = 7;
export const CATEGORIES = 6;

export interface Scale {
  kind: TokenColumn["scale"];
  /** Ends of the scale; values beyond have the color of the end. For kinds: least and largest. */
  low: number;
  high: number;
  /** The least number has the strongest color: of log-probs, the least likely token is worth a look. */
  reversed: boolean;
}

/** One token among thousands with an extreme number must not pale all others: the scale ends at this share of the values. */
const KEPT = 0.98;

export function scaleOf(column: Pick<TokenColumn, "name" | "scale" | "values">): Scale {
  const reversed = isLogProb(column.name);
  const values = column.values.filter((value) => value !== null).sort((one, other) => one - other);
  if (values.length === 0) return { kind: column.scale, low: 0, high: 0, reversed };
  const least = values[0]!;
  const most = values[values.length - 1]!;
  if (column.scale === "category") return { kind: "category", low: least, high: most, reversed: false };
  if (column.scale === "diverging") {
    const sizes = values.map(Math.abs).sort((one, other) => one - other);
    const end = quantile(sizes, KEPT) || sizes[sizes.length - 1]!;
    return { kind: "diverging", low: -end, high: end, reversed: false };
  }
  const rest = 1 - KEPT;
  const low = quantile(values, rest / 2);
  const high = quantile(values, 1 - rest / 2);
  return low < high ? { kind: "sequential", low, high, reversed } : { kind: "sequential", low: least, high: most, reversed };
}

/** Class of a token, "" where it has no number. */
export function classOf(value: number | null | undefined, { kind, low, high, reversed }: Scale): string {
  if (value === null || value === undefined) return "";
  if (kind === "category") return `c${modulo(Math.round(value), CATEGORIES)}`;
  if (kind === "diverging") {
    if (high <= 0) return `d${(DIVERGING_STEPS - 1) / 2}`;
    const middle = (DIVERGING_STEPS - 1) / 2;
    return `d${middle + Math.round(clamp(value / high, -1, 1) * middle)}`;
  }
  const share = high > low ? clamp((value - low) / (high - low), 0, 1) : 0;
  return `s${Math.round((reversed ? 1 - share : share) * (SEQUENTIAL_STEPS - 1))}`;
}

/** Places of the tokens with the largest numbers (in size where the scale is around zero; the least log-probs), in their order. */
export function extremes(column: Pick<TokenColumn, "name" | "scale" | "values">, count: number): number[] {
  const size = (value: number) => (column.scale === "diverging" ? Math.abs(value) : isLogProb(column.name) ? -value : value);
  return column.values
    .flatMap((value, place) => (value === null ? [] : [[size(value), place] as const]))
    .sort(([one], [other]) => other - one)
    .slice(0, count)
    .map(([, place]) => place)
    .sort((one, other) => one - other);
}

function isLogProb(name: string): boolean {
  return name.endsWith("log_prob");
}

/** `sorted` ascending; linear between neighbors. */
function quantile(sorted: readonly number[], share: number): number {
  const at = share * (sorted.length - 1);
  const below = Math.floor(at);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below]! + (sorted[above]! - sorted[below]!) * (at - below);
}

function clamp(value: number, low: number, high: number): number {
  return Math.min(high, Math.max(low, value));
}

function modulo(value: number, by: number): number {
  return ((value % by) + by) % by;
}
