/** Numbers as text: short, and of equal width where they lie below one another. */

const MINUS = "\u2212";

/** At most four digits that count, such as `0.1235`, `12.35`, `1,235`, `1.2e-7`. Null is a dash. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(1).replace("-", MINUS).replace("e+", "e");
  if (size >= 1e6) return compact(value);
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return grouped(Number(value.toFixed(digits)));
}

/** For axes: `1.5k`, `20M`, `0.0001`. */
export function compact(value: number): string {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]] as const) {
    if (size >= unit) return grouped(Number((value / unit).toPrecision(3))) + letter;
  }
  if (size >= 1e4) return grouped(Number((value / 1e3).toPrecision(3))) + "k";
  if (size !== 0 && size < 1e-4) return value.toExponential().replace("-", MINUS).replace("-", MINUS);
  return grouped(Number(value.toPrecision(6)));
}

/** Every digit, with thousands apart: for counts and positions. */
export function grouped(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 6 }).replace("-", MINUS);
}

/** A fixed number of decimals, so that columns line up; null is empty. */
export function fixed(value: number | null | undefined, decimals: number): string {
  if (value === null || value === undefined) return "";
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).replace("-", MINUS);
}

/** Decimals with which every value of a column shows three digits that count, at most four decimals. */
export function decimalsOf(values: readonly (number | null)[]): number {
  let largest = 0;
  let whole = true;
  for (const value of values) {
    if (value === null) continue;
    largest = Math.max(largest, Math.abs(value));
    whole &&= Number.isInteger(value);
  }
  if (whole) return 0;
  return largest >= 1000 ? 0 : largest >= 100 ? 1 : largest >= 10 ? 2 : largest >= 1 ? 3 : 4;
}

export function percent(share: number | null): string {
  if (share === null) return "–";
  return share === 0 ? "0%" : `${fixed(share * 100, share < 0.01 ? 2 : share < 0.1 ? 1 : 0)}%`;
}

/** `0.35 s`, `12 s`, `3 min 20 s`, `2 h 05 min`. */
export function duration(seconds: number | null): string {
  if (seconds === null) return "–";
  if (seconds < 0.001) return `${short(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

export function bytes(count: number | null): string {
  if (count === null) return "–";
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]] as const) {
    if (count >= unit) return `${Number((count / unit).toPrecision(3))} ${name}`;
  }
  return `${count} B`;
}

/** Local date and time, to the second. */
export function moment(seconds: number | null): string {
  if (seconds === null) return "–";
  const date = new Date(seconds * 1000);
  const two = (part: number) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Policy versions: `3`, or `3 to 5`. */
export function versions(oldest: number | null | undefined, newest: number | null | undefined): string {
  if (oldest === null || oldest === undefined) return "–";
  return oldest === newest || newest === null || newest === undefined ? String(oldest) : `${oldest} to ${newest}`;
}
