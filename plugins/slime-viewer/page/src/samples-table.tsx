/** Samples as a table: of a step, a group, or a search. */

import { useEffect } from "preact/hooks";
import type { SampleKey, Samples } from "./api";
import { keepListing } from "./listing";
import { grouped, versions } from "./number-format";
import { type Column, numberColumn, present, type Sorting, Table } from "./table";

export function SamplesTable({
  samples,
  withStep,
  pending,
  searched,
  onePrompt,
  sorting,
  hrefOf,
}: {
  samples: Samples;
  withStep: boolean;
  pending: boolean;
  searched: boolean;
  /** All rows have the same prompt, which is then shown once. */
  onePrompt: boolean;
  sorting: Sorting;
  hrefOf(key: SampleKey): string;
}) {
  useEffect(() => keepListing(samples.at, location.hash), [samples]);
  return (
    <>
      {onePrompt && samples.prompt[0] !== undefined ? <p class="prompt-line">{samples.prompt[0]}</p> : null}
      <Table
        label={samples.step === null ? "Samples" : `Samples of step ${samples.step}`}
        columns={columnsOf(samples, { withStep, searched, onePrompt, hrefOf })}
        rows={samples.at.length}
        rowKey={(row) => {
          const { step, index, part } = samples.at[row]!;
          return `${step}/${index}/${part}`;
        }}
        sorting={sorting}
        pending={pending}
      />
    </>
  );
}

function columnsOf(samples: Samples, { withStep, searched, onePrompt, hrefOf }: { withStep: boolean; searched: boolean; onePrompt: boolean; hrefOf(key: SampleKey): string }): Column[] {
  return present([
    withStep ? { key: "step", title: "step", sort: "step", kind: "number", cell: (row) => grouped(samples.at[row]!.step) } : null,
    {
      key: "index",
      title: "sample",
      sort: "index",
      kind: "number",
      cell: (row) => {
        const key = samples.at[row]!;
        return (
          <a class="row" href={hrefOf(key)}>
            {key.index}
            {key.part > 0 ? `.${key.part}` : ""}
          </a>
        );
      },
    },
    onePrompt ? null : { key: "group", title: "group", sort: "group", kind: "number", cell: (row) => samples.group[row] },
    numberColumn({ key: "reward", title: "reward", sort: "reward" }, samples.reward),
    onePrompt ? null : { key: "prompt", title: "prompt", kind: "text", cell: (row) => <span class="excerpt">{samples.prompt[row]}</span> },
    { key: "response", title: searched ? "found" : "response", kind: "text", cell: (row) => <Excerpt text={samples.excerpt[row]!} marks={samples.marks[row]!} /> },
    { key: "tokens", title: "tokens", sort: "tokens", descendingFirst: true, kind: "number", cell: (row) => grouped(samples.tokens[row]!) },
    samples.trained.some((count, row) => count !== samples.tokens[row]) ? { key: "trained", title: "trained", hint: "Tokens that are trained.", kind: "number", cell: (row) => grouped(samples.trained[row]!) } : null,
    samples.status.some((status) => status !== "completed") ? { key: "status", title: "status", kind: "text", cell: (row) => samples.status[row] } : null,
    samples.newest.some((value) => value !== null) ? { key: "version", title: "version", sort: "version", hint: "Policy versions that generated the tokens.", kind: "number", cell: (row) => versions(samples.oldest[row], samples.newest[row]) } : null,
    numberColumn({ key: "log_prob", title: "log-prob", sort: "log_prob", hint: "Mean log-prob of the trained tokens, by the engine." }, samples.log_prob),
    numberColumn({ key: "advantage", title: "|advantage|", sort: "advantage", descendingFirst: true, hint: "Mean size of the advantages of trained tokens." }, samples.advantage),
    numberColumn({ key: "mismatch", title: "mismatch", sort: "mismatch", descendingFirst: true, hint: "Mean absolute difference between the trainer's and the engine's log-probs." }, samples.mismatch),
    numberColumn({ key: "entropy", title: "entropy", sort: "entropy", descendingFirst: true }, samples.entropy),
    ...Object.entries(samples.parts).map(([part, values]) => numberColumn({ key: `part:${part}`, title: part, sort: `part:${part}`, hint: `Reward part ${part}.` }, values)),
    ...Object.entries(samples.counts).map(([count, values]) => numberColumn({ key: `count:${count}`, title: count, sort: `count:${count}`, descendingFirst: true }, values)),
  ]);
}

/** Text with its places found; every piece is a text node. */
function Excerpt({ text, marks }: { text: string; marks: readonly (readonly [number, number])[] }) {
  const pieces = [];
  let end = 0;
  for (const [start, stop] of marks) {
    if (start < end) continue;
    pieces.push(text.slice(end, start), <mark key={start}>{text.slice(start, stop)}</mark>);
    end = stop;
  }
  return (
    <span class="excerpt">
      {pieces}
      {text.slice(end)}
    </span>
  );
}
