/** Curves of many charts in few requests: those of one frame and run go together. */

import { useEffect, useState } from "preact/hooks";
import type { Curve, Series } from "./api";
import { ApiError } from "./client";
import { api, version } from "./replies";

/** Names in one request: addresses stay below 4 kB. */
const TOGETHER = 40;

interface Waiting {
  name: string;
  done(curve: Curve | null): void;
  failed(error: ApiError): void;
}

const queues = new Map<string, Waiting[]>();

function load(run: string, name: string, points: number): Promise<Curve | null> {
  return new Promise((done, failed) => {
    const key = `${run}\n${points}`;
    const queue = queues.get(key);
    if (queue) queue.push({ name, done, failed });
    else {
      queues.set(key, [{ name, done, failed }]);
      setTimeout(() => send(key, run, points));
    }
  });
}

function send(key: string, run: string, points: number): void {
  const waiting = queues.get(key) ?? [];
  queues.delete(key);
  const names = [...new Set(waiting.map(({ name }) => name))].sort();
  for (let start = 0; start < names.length; start += TOGETHER) {
    const asked = names.slice(start, start + TOGETHER);
    const served = waiting.filter(({ name }) => asked.includes(name));
    api()
      .get<Series>(`/api/runs/${encodeURIComponent(run)}/series`, { names: asked.join(","), points })
      .then(
        ({ series }) => served.forEach(({ name, done }) => done(series[name] ?? null)),
        (error: unknown) => {
          if (!(error instanceof ApiError)) throw error;
          served.forEach(({ failed }) => failed(error));
        },
      );
  }
}

export interface LoadedCurve {
  run: string;
  name: string;
  curve: Curve;
}

/** Curves of each run and name, those that are there; undefined until the first are. `shown` false asks for nothing. */
export function useCurves(
  runs: readonly string[],
  names: readonly string[],
  points: number,
  shown: boolean,
): { curves: LoadedCurve[] | undefined; error: string | null } {
  const [state, setState] = useState<{ curves: LoadedCurve[] | undefined; error: string | null }>({ curves: undefined, error: null });
  const stamp = shown ? runs.map((run) => version(run, ["metrics"])).join() : "";
  const key = JSON.stringify([runs, names, points, shown]);
  useEffect(() => {
    if (!shown) return;
    let current = true;
    const asked = runs.flatMap((run) => names.map((name) => ({ run, name })));
    Promise.all(asked.map(async ({ run, name }) => ({ run, name, curve: await load(run, name, points) }))).then(
      (all) => {
        if (current) setState({ curves: all.filter((one): one is LoadedCurve => one.curve !== null), error: null });
      },
      (error: unknown) => {
        if (!(error instanceof ApiError)) throw error;
        if (current) setState((before) => ({ ...before, error: error.message }));
      },
    );
    return () => {
      current = false;
    };
  }, [key, stamp]);
  return state;
}
