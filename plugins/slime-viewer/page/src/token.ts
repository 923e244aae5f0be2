/** The token of `slime view`: from the address that it printed, kept for links that are opened in other tabs. */

import { signal } from "@preact/signals";
import { takeToken } from "./address";

const KEY = "slime-view-token";

/** Null in an exported file, and where the page was opened without one. */
export const token = signal<string | null>(null);

/** Reads the token from the address, and removes it there. */
export function readToken(): void {
  const found = takeToken(location.hash);
  if (found.token !== null) {
    setToken(found.token);
    history.replaceState(null, "", location.pathname + location.search + found.hash);
  } else {
    token.value = storage()?.getItem(KEY) ?? null;
  }
}

export function setToken(text: string): void {
  token.value = text;
  storage()?.setItem(KEY, text);
}

/** Null where the browser keeps nothing, as in some private windows. */
function storage(): Storage | null {
  try {
    return localStorage;
  } catch {
    return null;
  }
}
