/**
 * What the page shows, as the part of the address behind `#`: `#/rollouts?run=demo&step=12&sort=reward`. An exported file is opened
 * from a disk, so there is no server that could serve other paths.
 */

export interface Address {
  /** Such as `rollouts`, or `panel/NAME`. */
  view: string;
  query: Query;
}

export type Query = Readonly<Record<string, string>>;

export const FIRST_VIEW = "curves";

export function parseAddress(hash: string): Address {
  const text = hash.replace(/^#\/?/, "");
  const mark = text.indexOf("?");
  const view = decodePart(mark < 0 ? text : text.slice(0, mark));
  const query: Record<string, string> = {};
  if (mark >= 0) for (const [key, value] of new URLSearchParams(text.slice(mark + 1))) query[key] = value;
  return { view: view === "" || view.includes("=") ? FIRST_VIEW : view, query };
}

/** Keys in order and no empty values: the same state has one address. */
export function formatAddress({ view, query }: Address): string {
  const written = Object.keys(query)
    .filter((key) => query[key] !== "")
    .sort()
    .map((key) => `${key}=${encodeValue(query[key]!)}`)
    .join("&");
  return `#/${view.split("/").map(encodeURIComponent).join("/")}${written ? `?${written}` : ""}`;
}

/** `changes` replace keys of `query`; null and "" remove one. */
export function changed(query: Query, changes: Readonly<Record<string, string | number | null>>): Query {
  const next: Record<string, string> = { ...query };
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === "") delete next[key];
    else next[key] = String(value);
  }
  return next;
}

export function whole(query: Query, key: string): number | null {
  const text = query[key];
  return text !== undefined && /^-?\d+$/.test(text) ? Number(text) : null;
}

/** A number in [low, high], or `otherwise`. */
export function within(query: Query, key: string, low: number, high: number, otherwise: number): number {
  const value = Number(query[key] ?? Number.NaN);
  return value >= low && value <= high ? value : otherwise;
}

export function oneOf<Choice extends string>(query: Query, key: string, choices: readonly Choice[]): Choice {
  return choices.find((choice) => choice === query[key]) ?? choices[0]!;
}

export function list(query: Query, key: string): string[] {
  return query[key] ? query[key].split(",").map(decodePart) : [];
}

/** A list as one value: a comma in an entry is written as %2C. */
export function joined(entries: readonly string[]): string {
  return entries.map((entry) => entry.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

/**
 * The token in `#token=...`, as `slime view` prints it, and the hash without it: it must not be in links that are copied from the page.
 */
export function takeToken(hash: string): { token: string | null; hash: string } {
  const found = /(^#|[?&#])token=([^&]*)(&|$)/.exec(hash);
  if (!found) return { token: null, hash };
  const rest = hash.slice(0, found.index) + (found[1] === "#" ? "#" : found[3] === "&" ? found[1] : "") + hash.slice(found.index + found[0].length);
  return { token: decodePart(found[2]!), hash: rest === "#" ? "" : rest };
}

function decodePart(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Leaves what reads well and is safe behind `#`. */
function encodeValue(text: string): string {
  return encodeURIComponent(text).replaceAll("%2F", "/").replaceAll("%3A", ":").replaceAll("%2C", ",").replaceAll("%20", "+");
}
