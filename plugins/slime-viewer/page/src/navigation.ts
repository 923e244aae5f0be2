/** The address that is shown, and changes to it. */

import { computed, signal } from "@preact/signals";
import { type Address, changed, formatAddress, list, parseAddress, type Query } from "./address";

export const address = signal<Address>(parseAddress(location.hash));

addEventListener("hashchange", () => {
  address.value = parseAddress(location.hash);
});

export const view = computed(() => address.value.view);
export const query = computed(() => address.value.query);

/** The run that the page is about; null: the first one. */
export const currentRun = computed(() => query.value.run ?? null);

/** Runs that are laid over it in curves and tables. */
export const overlaid = computed(() => list(query.value, "over"));

/** Keys that stay when another view is opened. */
const KEPT = ["run", "over"] as const;

const lastQuery = new Map<string, Query>();

export function href(view: string, changes: Readonly<Record<string, string | number | null>> = {}): string {
  const kept: Record<string, string> = {};
  for (const key of KEPT) if (query.value[key]) kept[key] = query.value[key];
  return formatAddress({ view, query: changed(kept, changes) });
}

/** A view as it was left, with the runs of now. */
export function tabHref(view: string): string {
  const last = lastQuery.get(view);
  const { run } = query.value;
  return last && (last.run ?? null) === (run ?? null) ? formatAddress({ view, query: changed(last, { over: query.value.over ?? null }) }) : href(view);
}

export function open(hash: string, options: { replace?: boolean } = {}): void {
  if (hash === location.hash) return;
  if (options.replace) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
  address.value = parseAddress(hash);
}

/** Changes the query of this view. `replace`: without a step of its own for "back", as while a text is typed. */
export function adjust(changes: Readonly<Record<string, string | number | null>>, options: { replace?: boolean } = {}): void {
  const next = { view: view.value, query: changed(query.value, changes) };
  lastQuery.set(next.view, next.query);
  open(formatAddress(next), options);
}

/** Remembers how a view was left. */
export function remember({ view, query }: Address): void {
  lastQuery.set(view, query);
}
