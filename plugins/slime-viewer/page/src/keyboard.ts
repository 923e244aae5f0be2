/** Keys of the page. Views add theirs while they are shown; `?` lists what is there. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

export interface Shortcut {
  /** As `KeyboardEvent.key` has it; two keys one after the other are separated by a space: `g c`. */
  keys: string;
  /** What it does, for the list. */
  title: string;
  run(): void;
}

/** Innermost view last: it goes first. */
export const shortcuts = signal<readonly Shortcut[]>([]);

/** The keys of a component, while it is shown. */
export function useShortcuts(added: readonly Shortcut[]): void {
  const latest = useRef(added);
  latest.current = added;
  const names = added.map((shortcut) => shortcut.keys).join("\n");
  useEffect(() => {
    const live = latest.current.map((shortcut, place) => ({ ...shortcut, run: () => latest.current[place]?.run() }));
    shortcuts.value = [...shortcuts.peek(), ...live];
    return () => {
      shortcuts.value = shortcuts.peek().filter((shortcut) => !live.includes(shortcut));
    };
  }, [names]);
}

/** Milliseconds in which the second key has to come. */
const TOGETHER = 900;

export function listen(): void {
  let first: { key: string; time: number } | null = null;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isTyping(event.target)) return;
    const pair = first && event.timeStamp - first.time < TOGETHER ? `${first.key} ${event.key}` : null;
    first = { key: event.key, time: event.timeStamp };
    const all = shortcuts.peek();
    const found = all.findLast((shortcut) => shortcut.keys === pair) ?? all.findLast((shortcut) => shortcut.keys === event.key);
    if (found && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      first = null;
      found.run();
    }
  });
}

function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (target instanceof HTMLInputElement) return !["checkbox", "radio", "range", "button"].includes(target.type);
  return target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement || target.isContentEditable;
}
