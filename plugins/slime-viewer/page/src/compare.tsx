/** Runs side by side: what `slime compare` prints, and the keys of their configs that differ. */

import { useState } from "preact/hooks";
import type { Compare as CompareReply, Config, ConfigDifference, Run } from "./api";
import { matches } from "./metric-groups";
import { Notice, Waiting } from "./notice";
import { duration, moment, percent, short, grouped } from "./number-format";
import { useReply } from "./replies";
import { TextField } from "./controls";
import { adjust, query } from "./navigation";

export function Compare({ runs }: { runs: readonly Run[] }) {
  const ids = runs.map((run) => run.id).join(",");
  const table = useReply<CompareReply>({ path: "/api/compare", parameters: { runs: ids }, run: "*", parts: ["run"] }, { hold: true });
  const difference = useReply<ConfigDifference>(runs.length > 1 ? { path: "/api/config-difference", parameters: { runs: ids } } : null, { hold: true });
  return (
    <>
      {table.error ? <Notice problem>{table.error}</Notice> : null}
      {table.data ? <Rows table={table.data} /> : table.error ? null : <Waiting />}
      {runs.length > 1 ? (
        <section class="group">
          <h2>Keys of the configs that differ</h2>
          {difference.error ? <Notice problem>{difference.error}</Notice> : null}
          {difference.data ? <Difference difference={difference.data} /> : difference.error ? null : <Waiting />}
        </section>
      ) : null}
      {runs[0] ? <WholeConfig run={runs[0]} /> : null}
    </>
  );
}

type Row = CompareReply["rows"][number];

function text(kind: Row["kind"], value: number | string | null): string {
  if (value === null) return "–";
  if (typeof value === "string") return value;
  switch (kind) {
    case "share":
      return percent(value);
    case "seconds":
      return duration(value);
    case "count":
      return grouped(value);
    case "time":
      return moment(value);
    default:
      return short(value);
  }
}

/** Place of the value that is marked; -1 where all are equal, or none is better. */
function bestOf({ better, values }: Row): number {
  const numbers = values.map((value) => (typeof value === "number" ? value : null));
  const known = numbers.filter((value) => value !== null);
  if (better === null || known.length < 2 || new Set(known).size < 2) return -1;
  return numbers.indexOf(better === "high" ? Math.max(...known) : Math.min(...known));
}

function Rows({ table }: { table: CompareReply }) {
  // The table below has the configs with room for long values.
  const sections = [...new Set(table.rows.map(({ section }) => section))].filter((section) => section !== "config");
  return (
    <div class="table" role="region" aria-label="Runs side by side" tabIndex={0}>
      <table class="narrow sections">
        <thead>
          <tr>
            <th scope="col" class="text"> <span class="hidden">what</span></th>
            {table.runs.map((id) => (
              <th key={id} scope="col" class="number">{id}</th>
            ))}
          </tr>
        </thead>
        {sections.map((section) => (
          <tbody key={section}>
            <tr class="section">
              <th scope="rowgroup" class="text" colSpan={table.runs.length + 1}>{section}</th>
            </tr>
            {table.rows
              .filter((row) => row.section === section)
              .map((row) => {
                const best = bestOf(row);
                return (
                  <tr key={row.name}>
                    <th scope="row" class="text">{row.name}</th>
                    {row.values.map((value, place) => (
                      <td key={table.runs[place]} class={place === best ? "number best" : "number"}>
                        {text(row.kind, value)}
                        {place === best ? <span class="hidden"> (best)</span> : null}
                      </td>
                    ))}
                  </tr>
                );
              })}
          </tbody>
        ))}
      </table>
    </div>
  );
}

export function valueText(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function Difference({ difference }: { difference: ConfigDifference }) {
  if (difference.keys.length === 0) return <Notice>The configs are the same.</Notice>;
  return (
    <div class="table" role="region" aria-label="Differences of the configs" tabIndex={0}>
      <table class="narrow">
        <thead>
          <tr>
            <th scope="col" class="text">key</th>
            {difference.runs.map((id) => (
              <th key={id} scope="col" class="text">{id}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {difference.keys.map((key, row) => (
            <tr key={key}>
              <th scope="row" class="text"><code>{key}</code></th>
              {difference.runs.map((id, place) => (
                <td key={id} class="value-text">
                  {difference.there[row]![place] ? valueText(difference.values[row]![place]) : <span class="quiet">not set</span>}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function WholeConfig({ run }: { run: Run }) {
  const [opened, setOpened] = useState(false);
  const reply = useReply<Config>(opened ? { path: `/api/runs/${encodeURIComponent(run.id)}/config` } : null);
  const filter = query.value.key ?? "";
  const config = reply.data;
  return (
    <details class="group" onToggle={(event) => event.currentTarget.open && setOpened(true)}>
      <summary>
        <h2>Config of {run.id}</h2>
      </summary>
      {opened ? <TextField label="Keys" value={filter} placeholder="part of a key" onChange={(key) => adjust({ key }, { replace: true })} /> : null}
      {reply.error ? <Notice problem>{reply.error}</Notice> : null}
      {config ? (
        <div class="table" role="region" aria-label={`Config of ${run.id}`} tabIndex={0}>
          <table class="narrow">
            <thead>
              <tr>
                <th scope="col" class="text">key</th>
                <th scope="col" class="text">value</th>
              </tr>
            </thead>
            <tbody>
              {rowsOf(config)
                .filter(([key]) => matches(key, filter))
                .map(([key, value]) => (
                  <tr key={key}>
                    <th scope="row" class="text"><code>{key}</code></th>
                    <td class="value-text">{value}</td>
                  </tr>
                ))}
            </tbody>
          </table>
        </div>
      ) : opened && !reply.error ? (
        <Waiting />
      ) : null}
    </details>
  );
}

function rowsOf(config: Config): [string, string][] {
  return [
    ...Object.entries(config.values).map(([key, value]) => [key, valueText(value)] as [string, string]),
    ...Object.entries(config.plugins).map(([name, version]) => [`plugin ${name}`, version] as [string, string]),
    ...Object.entries(config.libraries).map(([name, version]) => [`library ${name}`, version] as [string, string]),
    ...(config.slime ? [["slime", config.slime] as [string, string]] : []),
    ...(config.python ? [["python", config.python] as [string, string]] : []),
  ];
}
