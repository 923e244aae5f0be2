/** Where replies come from: a running `slime view`, or the file that `--export` wrote. */

import type { PanelModule } from "./api";

export type Parameters = Readonly<Record<string, string | number | null | undefined>>;

export interface ApiClient {
  /** False in an exported file: nothing changes any more. */
  readonly live: boolean;
  /** `path` as in api.ts, such as `/api/runs`. Parameters that are null are left out. Throws ApiError. */
  get<Reply>(path: string, parameters?: Parameters, signal?: AbortSignal): Promise<Reply>;
  /** The module that draws a panel. Throws if it cannot be loaded. */
  panel(name: string): Promise<PanelModule>;
}

/** `status` as in api.ts; 0: no connection. `message` is a sentence for the user. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Path and parameters as one text, parameters sorted by name: the key of a reply. */
export function keyOf(path: string, parameters: Parameters = {}): string {
  const written = Object.entries(parameters)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .sort(([one], [other]) => (one < other ? -1 : 1))
    .map(([name, value]) => `${name}=${encodeURIComponent(String(value))}`)
    .join("&");
  return written ? `${path}?${written}` : path;
}

export class HttpClient implements ApiClient {
  readonly live = true;

  constructor(private readonly token: () => string | null) {}

  async get<Reply>(path: string, parameters?: Parameters, signal?: AbortSignal): Promise<Reply> {
    const token = this.token();
    const headers: Record<string, string> = token === null ? {} : { Authorization: `Bearer ${token}` };
    let response: Response;
    try {
      response = await fetch(keyOf(path, parameters), { headers, signal: signal ?? null, cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, "slime view does not respond. Is it still running?");
    }
    const body = (await response.json().catch(() => null)) as (Reply & { error?: string }) | null;
    if (response.ok && body !== null) return body;
    throw new ApiError(response.status, body?.error ?? `The reply has status ${response.status} and is not JSON.`);
  }

  panel(name: string): Promise<PanelModule> {
    return import(/* @vite-ignore */ new URL(`/panels/${encodeURIComponent(name)}.js`, location.origin).href) as Promise<PanelModule>;
  }
}
