/** The groups of a step as a table. */

import type { Groups } from "./api";
import { grouped, short, versions } from "./number-format";
import { type Column, numberColumn, present, type Sorting, Table } from "./table";

export function GroupsTable({ groups, pending, sorting, hrefOf }: { groups: Groups; pending: boolean; sorting: Sorting; hrefOf(group: number): string }) {
  return (
    <Table
      label={`Groups of step ${groups.step}`}
      columns={columnsOf(groups, sorting.sort, hrefOf)}
      rows={groups.group.length}
      rowKey={(row) => String(groups.group[row])}
      rowClass={(row) => (groups.spread[row] === 0 && groups.samples[row]! > 1 ? "flat" : undefined)}
      sorting={sorting}
      pending={pending}
    />
  );
}

function columnsOf(groups: Groups, sort: string, hrefOf: (group: number) => string): Column[] {
  const [least, most] = rangeOf([...groups.lowest, ...groups.highest]);
  const name: Column = {
    key: "group",
    title: "group",
    sort: "group",
    kind: "number",
    cell: (row) => (
      <a class="row" href={hrefOf(groups.group[row]!)}>
        {groups.group[row]}
      </a>
    ),
  };
  const prompt: Column = { key: "prompt", title: "prompt", kind: "text", cell: (row) => <span class="excerpt">{groups.prompt[row]}</span> };
  const range: Column = {
    key: "range",
    title: "rewards",
    hint: "From the lowest to the highest reward; the dot is the mean.",
    kind: "text",
    cell: (row) => <RewardRange low={groups.lowest[row]!} mean={groups.reward[row]!} high={groups.highest[row]!} least={least} most={most} />,
  };
  const spread = numberColumn({ key: "spread", title: "spread", sort: "spread", descendingFirst: true, hint: "Standard deviation of the rewards in the group. 0: the group teaches GRPO nothing." }, groups.spread);
  return present([
    name,
    numberColumn({ key: "reward", title: "reward", sort: "reward", hint: "Mean reward of the group." }, groups.reward),
    most > least ? range : null,
    prompt,
    { key: "samples", title: "samples", kind: "number", cell: (row) => groups.samples[row] },
    numberColumn({ key: "lowest", title: "lowest", sort: "lowest" }, groups.lowest),
    numberColumn({ key: "highest", title: "highest", sort: "highest", descendingFirst: true }, groups.highest),
    spread,
    numberColumn({ key: "tokens", title: "tokens", sort: "tokens", descendingFirst: true, hint: "Mean response tokens." }, groups.tokens.map((value) => (value === null ? null : Math.round(value)))),
    { key: "longest", title: "longest", sort: "longest", descendingFirst: true, kind: "number", cell: (row) => grouped(groups.longest[row]!) },
    groups.truncated.some((count) => count > 0) || sort === "truncated" ? { key: "truncated", title: "truncated", sort: "truncated", descendingFirst: true, hint: "Responses that reached the length limit.", kind: "number", cell: (row) => groups.truncated[row] || "" } : null,
    groups.newest.some((value) => value !== null) ? { key: "version", title: "version", sort: "version", hint: "Policy versions that generated the tokens.", kind: "number", cell: (row) => versions(groups.oldest[row], groups.newest[row]) } : null,
    numberColumn({ key: "advantage", title: "|advantage|", sort: "advantage", descendingFirst: true, hint: "Mean size of the advantages of trained tokens." }, groups.advantage),
    numberColumn({ key: "mismatch", title: "mismatch", sort: "mismatch", descendingFirst: true, hint: "Mean absolute difference between the trainer's and the engine's log-probs." }, groups.mismatch),
    numberColumn({ key: "entropy", title: "entropy", sort: "entropy", descendingFirst: true }, groups.entropy),
    ...Object.entries(groups.parts).map(([part, values]) => numberColumn({ key: `part:${part}`, title: part, sort: `part:${part}`, hint: `Mean of the reward part ${part}.` }, values)),
    ...Object.entries(groups.counts).map(([count, values]) => numberColumn({ key: `count:${count}`, title: count, sort: `count:${count}`, descendingFirst: true, hint: `Mean of ${count}.` }, values)),
  ]);
}

function rangeOf(values: readonly (number | null)[]): [number, number] {
  const known = values.filter((value) => value !== null);
  return known.length === 0 ? [0, 0] : [Math.min(...known), Math.max(...known)];
}

const WIDTH = 64;

function RewardRange({ low, mean, high, least, most }: { low: number | null; mean: number | null; high: number | null; least: number; most: number }) {
  if (low === null || mean === null || high === null) return null;
  const at = (value: number) => 4 + ((value - least) / (most - least)) * (WIDTH - 8);
  return (
    <svg class="range" width={WIDTH} height="12" role="img" aria-label={`from ${short(low)} to ${short(high)}, mean ${short(mean)}`}>
      <line class="track" x1="4" x2={WIDTH - 4} y1="6" y2="6" />
      <line class="span" x1={at(low)} x2={at(high)} y1="6" y2="6" />
      <circle cx={at(mean)} cy="6" r="2.5" />
    </svg>
  );
}
