/** Replies of the API in components: kept while newer ones are on their way, so that nothing jumps. */

import { type Signal, signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Changes, Part } from "./api";
import { type ApiClient, ApiError, keyOf, type Parameters } from "./client";

let client: ApiClient | null = null;

export function setClient(chosen: ApiClient): void {
  client = chosen;
}

export function api(): ApiClient {
  if (client === null) throw new Error("setClient has not been called");
  return client;
}

// ---------------------------------------------------------------- what changed

/** Counts changes of a part of a run; `*` is the list of runs. */
const versions = new Map<string, Signal<number>>();

function versionOf(run: string, part: Part): Signal<number> {
  const key = `${run}\n${part}`;
  let found = versions.get(key);
  if (!found) versions.set(key, (found = signal(0)));
  return found;
}

/** A number that grows when any of these parts changes. */
export function version(run: string, parts: readonly Part[]): number {
  return parts.reduce((sum, part) => sum + versionOf(run, part).value, 0);
}

/** How the page hears of changes: `lost` has the sentence to show. */
export const connection = signal<{ lost: string | null; denied: boolean }>({ lost: null, denied: false });

const INTERVAL = 2000;
const HIDDEN_INTERVAL = 10_000;

/** Asks for changes until the page is closed. */
export function follow(): void {
  let cursor: string | null = null;
  const again = () => setTimeout(once, document.hidden ? HIDDEN_INTERVAL : INTERVAL);
  async function once(): Promise<void> {
    try {
      const reply: Changes = await api().get("/api/changes", { cursor });
      const first = cursor === null;
      cursor = reply.cursor;
      if (connection.value.lost !== null || connection.value.denied) connection.value = { lost: null, denied: false };
      if (!first) {
        for (const { run, parts } of reply.changed) {
          for (const part of parts) versionOf(run, part).value++;
          versionOf("*", "run").value++;
        }
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const denied = error.status === 401;
      connection.value = { lost: error.message, denied };
      // A server that was started again has other cursors.
      cursor = error.status === 400 ? null : cursor;
    }
    again();
  }
  void once();
}

// ---------------------------------------------------------------- replies

export interface Reply<Data> {
  /** Undefined until the first reply. While another one is on its way, the one before. */
  data: Data | undefined;
  /** A sentence, or null. */
  error: string | null;
  /** `data` is not (yet) the reply to these parameters. */
  pending: boolean;
}

/** The newest replies by key, so that "back" is at once. */
const kept = new Map<string, unknown>();
const KEPT = 120;

function keep(key: string, data: unknown): void {
  kept.delete(key);
  kept.set(key, data);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value!);
}

export interface Asked {
  path: string;
  parameters?: Parameters;
  /** Asks again when one of these changes. */
  run?: string;
  parts?: readonly Part[];
}

/** Replies in a row without news, after which an unfinished one is taken for the last. */
const SAME = 5;

/**
 * Null asks for nothing. `hold`: between two sets of parameters shows the former reply instead of none. `unfinished`: true while the
 * server still works on the rest of a reply, as when it reads the samples of a run for the first time; the page then asks again.
 */
export function useReply<Data>(asked: Asked | null, options: { hold?: boolean; unfinished?: (data: Data) => boolean } = {}): Reply<Data> {
  const key = asked ? keyOf(asked.path, asked.parameters) : null;
  const stamp = asked?.parts ? version(asked.run ?? "*", asked.parts) : 0;
  const [state, setState] = useState<{ key: string | null; data: unknown; error: string | null }>({ key: null, data: undefined, error: null });
  const former = useRef<unknown>(undefined);
  const [round, setRound] = useState(0);
  const same = useRef({ text: "", count: 0 });

  useEffect(() => {
    if (!asked || key === null) return;
    const controller = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    api()
      .get(asked.path, asked.parameters, controller.signal)
      .then(
        (data) => {
          keep(key, data);
          setState({ key, data, error: null });
          if (!options.unfinished?.(data as Data)) return;
          const text = JSON.stringify(data);
          same.current = { text, count: text === same.current.text ? same.current.count + 1 : 0 };
          if (same.current.count < SAME) timer = setTimeout(() => setRound((before) => before + 1), INTERVAL);
        },
        (error: unknown) => {
          if (controller.signal.aborted) return;
          if (!(error instanceof ApiError)) throw error;
          if (error.status === 401) connection.value = { lost: error.message, denied: true };
          setState((before) => ({ key, data: before.key === key ? before.data : undefined, error: error.message }));
        },
      );
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [key, stamp, round]);

  if (key === null) return { data: undefined, error: null, pending: false };
  const own = state.key === key;
  const data = own ? state.data : kept.get(key);
  if (data !== undefined) former.current = data;
  const shown = data ?? (options.hold && !(own && state.error) ? former.current : undefined);
  return { data: shown as Data | undefined, error: own ? state.error : null, pending: !own };
}
