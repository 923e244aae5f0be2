/** Serves replies from the data in an exported file. */

import type { Compare, Exported, Groups, PanelModule, Sample, Samples, Series, Timeline } from "./api";
import { type ApiClient, ApiError, keyOf, type Parameters } from "./client";
import { queryGroups, querySamples, type Query, textOfSample } from "./local-table";
import { PAGE_LENGTH } from "./pages";

export class ExportedClient implements ApiClient {
  readonly live = false;

  constructor(private readonly exported: Exported) {}

  get<Reply>(path: string, parameters: Parameters = {}): Promise<Reply> {
    try {
      return Promise.resolve(this.find(path, parameters) as Reply);
    } catch (error) {
      return Promise.reject(error instanceof Error ? error : new Error(String(error)));
    }
  }

  async panel(name: string): Promise<PanelModule> {
    const text = this.exported.modules[name];
    if (text === undefined) throw new Error(`the export has no panel ${name}`);
    const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    try {
      return (await import(/* @vite-ignore */ address)) as PanelModule;
    } finally {
      URL.revokeObjectURL(address);
    }
  }

  private find(path: string, parameters: Parameters): unknown {
    const { replies } = this.exported;
    const exact = replies[keyOf(path, parameters)];
    if (exact !== undefined) return exact;
    const last = path.slice(path.lastIndexOf("/") + 1);
    switch (last) {
      case "series":
        return this.series(path, parameters);
      case "groups":
        return queryGroups(this.table<Groups>(path, parameters), queryOf(parameters, "group"));
      case "samples":
        return this.samples(path, parameters);
      case "timeline":
        return this.timeline(path, parameters);
      case "events":
        return this.base(path, {});
      case "compare":
        return this.compare(parameters);
      case "sample":
        throw new ApiError(404, "The export does not hold this sample. It has those that the tables list first.");
      default:
        throw new ApiError(404, "The export does not hold this.");
    }
  }

  private base<Reply>(path: string, parameters: Parameters): Reply {
    const reply = this.exported.replies[keyOf(path, parameters)];
    if (reply === undefined) throw new ApiError(404, "The export does not hold this.");
    return reply as Reply;
  }

  /** Each name may be there alone, or in any of the replies. */
  private series(path: string, parameters: Parameters): Series {
    const found: Series = { series: {} };
    const names = String(parameters.names ?? "").split(",");
    for (const [key, reply] of Object.entries(this.exported.replies)) {
      if (key.split("?", 1)[0] !== path) continue;
      for (const name of names) {
        const curve = (reply as Series).series[name];
        if (curve) found.series[name] = curve;
      }
    }
    return found;
  }

  private table<Reply extends Groups | Samples>(path: string, { set, step }: Parameters): Reply {
    return this.base<Reply>(path, { set: set ?? null, step: step ?? null });
  }

  private samples(path: string, parameters: Parameters): Samples {
    const set = parameters.set ?? null;
    const { replies } = this.exported;
    const whole = replies[keyOf(path, { set, limit: 100000 })] ?? replies[keyOf(path, { set })] ?? this.table<Samples>(path, parameters);
    const reply = whole as Samples;
    const step = Number.isInteger(Number(parameters.step ?? "all")) ? Number(parameters.step) : null;
    const group = parameters.group === null || parameters.group === undefined ? null : Number(parameters.group);
    return querySamples(reply, queryOf(parameters, "step"), { step, group }, (row) => {
      const { step: of, index, part } = reply.at[row]!;
      const sample = replies[keyOf(`${path.slice(0, -1)}`, { set, step: of, index, part: part || null })] as Sample | undefined;
      return sample ? textOfSample(sample) : null;
    });
  }

  private timeline(path: string, { start, end }: Parameters): Timeline {
    const whole = this.base<Timeline>(path, {});
    return { ...whole, start: Number(start ?? whole.start), end: Number(end ?? whole.end) };
  }

  /** Columns of the table of all runs. */
  private compare({ runs }: Parameters): Compare {
    const asked = String(runs ?? "").split(",");
    const whole = Object.entries(this.exported.replies).find(([key]) => key.split("?", 1)[0] === "/api/compare")?.[1] as Compare | undefined;
    if (!whole) throw new ApiError(404, "The export does not hold this.");
    const places = asked.map((run) => whole.runs.indexOf(run)).filter((place) => place >= 0);
    return { runs: places.map((place) => whole.runs[place]!), rows: whole.rows.map((row) => ({ ...row, values: places.map((place) => row.values[place] ?? null) })) };
  }
}

function queryOf(parameters: Parameters, sort: string): Query {
  return {
    sort: String(parameters.sort ?? sort),
    descending: String(parameters.descending ?? "0") === "1",
    q: String(parameters.q ?? ""),
    where: String(parameters.where ?? ""),
    offset: Number(parameters.offset ?? 0),
    limit: Number(parameters.limit ?? PAGE_LENGTH),
  };
}
