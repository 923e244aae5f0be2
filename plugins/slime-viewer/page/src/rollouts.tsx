/** Groups and samples of a step, of training or of an evaluation set: sorted, filtered, searched. */

import { useState } from "preact/hooks";
import { changed, formatAddress, whole } from "./address";
import type { Groups, Run, Samples, Steps } from "./api";
import { ApiError } from "./client";
import { Choices, Select, TextField } from "./controls";
import { GroupsTable } from "./groups-table";
import { useShortcuts } from "./keyboard";
import { adjust, href, open, query, view } from "./navigation";
import { Notice, Waiting } from "./notice";
import { grouped, short } from "./number-format";
import { PAGE_LENGTH, Pages } from "./pages";
import { api, useReply } from "./replies";
import { SamplesTable } from "./samples-table";
import { StepChart } from "./step-chart";

export type TableKind = "groups" | "samples";
const KINDS = [
  ["groups", "groups"],
  ["samples", "samples"],
] as const;

/** The step that was the last one when the view was opened: a live run must not replace rows under the reader's eyes. */
function usePinned(run: string, set: string, newest: number | null): number | null {
  const [pinned, setPinned] = useState<{ key: string; step: number | null }>({ key: "", step: null });
  const key = `${run}\n${set}`;
  if (newest !== null && (pinned.key !== key || pinned.step === null)) {
    setPinned({ key, step: newest });
    return newest;
  }
  return pinned.key === key ? pinned.step : newest;
}

export function Rollouts({ run, evaluation = false }: { run: Run; evaluation?: boolean }) {
  const asked = query.value;
  const path = `/api/runs/${encodeURIComponent(run.id)}`;
  const part = evaluation ? "evals" : "samples";
  const askedSet = evaluation ? (asked.set ?? null) : "train";
  const first = useReply<Steps>({ path: `${path}/steps`, parameters: { set: evaluation ? askedSet : null }, run: run.id, parts: [part] }, { hold: true, unfinished: stepsUnfinished });
  const sets = first.data?.sets.filter((set) => (set === "train") !== evaluation) ?? [];
  const set = evaluation ? (askedSet ?? sets[0] ?? null) : "train";
  const second = useReply<Steps>(evaluation && askedSet === null && set !== null ? { path: `${path}/steps`, parameters: { set }, run: run.id, parts: [part] } : null, { hold: true });
  const steps = evaluation && askedSet === null ? second : first;
  const newest = steps.data && steps.data.set === set ? (steps.data.step.at(-1) ?? null) : null;
  const pinned = usePinned(run.id, set ?? "", newest);

  if (first.error && !first.data) return <Notice problem>{first.error}</Notice>;
  if (!first.data) return <Waiting />;
  if (set === null || (steps.data && steps.data.set === set && steps.data.step.length === 0 && steps.data.unreadable.length === 0)) return <Notice>{evaluation ? NO_EVALS : NO_SAMPLES}</Notice>;
  if (!steps.data || steps.data.set !== set) return steps.error ? <Notice problem>{steps.error}</Notice> : <Waiting />;
  return <StepRows run={run} set={set} sets={sets} steps={steps.data} pinned={pinned} newest={newest} evaluation={evaluation} />;
}

/** Rewards are there once the samples of a step have been read. */
function stepsUnfinished({ reward }: Steps): boolean {
  return reward.includes(null);
}

function samplesUnfinished({ indexed, rows }: Samples): boolean {
  return indexed < rows;
}

const NO_SAMPLES = "No samples yet. A run records them while slime-viewer is installed, the newest up to 1 GiB; --dump-rollouts keeps those of all steps.";
const NO_EVALS = "No samples of evaluations yet. A run records them while slime-viewer is installed.";

function StepRows({
  run,
  set,
  sets,
  steps,
  pinned,
  newest,
  evaluation,
}: {
  run: Run;
  set: string;
  sets: readonly string[];
  steps: Steps;
  pinned: number | null;
  newest: number | null;
  evaluation: boolean;
}) {
  const asked = query.value;
  const all = asked.step === "all";
  const step = all ? null : (whole(asked, "step") ?? pinned ?? newest);
  const group = whole(asked, "group");
  const kind: TableKind = all || group !== null || asked.rows === "samples" || (evaluation && asked.rows !== "groups") ? "samples" : "groups";
  const [problem, setProblem] = useState<string | null>(null);

  const hrefOf = (changes: Readonly<Record<string, string | number | null>>) => formatAddress({ view: view.value, query: changed(query.value, { page: null, ...changes }) });
  const toStep = (next: number | null | undefined) => next !== null && next !== undefined && adjust({ step: next, page: null, group: null });
  const at = step === null ? -1 : steps.step.indexOf(step);
  const earlier = at > 0 ? steps.step[at - 1] : step === null ? undefined : steps.step.findLast((other) => other < step);
  const later = at >= 0 ? steps.step[at + 1] : step === null ? undefined : steps.step.find((other) => other > step);

  /** Opens the first sample of the step in this order. */
  async function pick(sort: string, descending: number): Promise<void> {
    try {
      const found: Samples = await api().get(`/api/runs/${encodeURIComponent(run.id)}/samples`, { set: set === "train" ? null : set, step: step ?? "all", sort, descending: descending || null, limit: 1 });
      const key = found.at[0];
      if (key) open(href("sample", { set: set === "train" ? null : set, step: key.step, index: key.index, part: key.part || null }));
      else setProblem("No samples in this step.");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    }
  }

  useShortcuts([
    { keys: "[", title: "step before", run: () => toStep(earlier) },
    { keys: "]", title: "next step", run: () => toStep(later) },
    { keys: "w", title: "worst sample of the step", run: () => void pick("reward", 0) },
    { keys: "b", title: "best sample of the step", run: () => void pick("reward", 1) },
    { keys: "v", title: "groups or samples", run: () => adjust({ rows: kind === "groups" ? "samples" : "groups", group: null, page: null, sort: null, desc: null }) },
  ]);

  return (
    <>
      <div class="toolbar">
        {sets.length > 1 || evaluation ? <Select label="Set" value={set} choices={sets.map((name) => [name, name])} onChange={(name) => adjust({ set: name, step: null, page: null, group: null })} /> : null}
        <div class="stepper" role="group" aria-label="Step">
          <a class={earlier === undefined ? "disabled" : ""} href={earlier === undefined ? undefined : hrefOf({ step: earlier, group: null })} aria-label="Step before" aria-disabled={earlier === undefined}>
            ‹
          </a>
          <Select
            label="Step"
            value={all ? "all" : String(step ?? "")}
            choices={[["all", "all steps"], ...steps.step.toReversed().map((number) => [String(number), grouped(number)] as const)]}
            onChange={(value) => adjust({ step: value, page: null, group: null })}
          />
          <a class={later === undefined ? "disabled" : ""} href={later === undefined ? undefined : hrefOf({ step: later, group: null })} aria-label="Next step" aria-disabled={later === undefined}>
            ›
          </a>
        </div>
        {newest !== null && step !== null && step < newest ? (
          <a class="fresh" href={hrefOf({ step: newest, group: null })}>
            newest: {grouped(newest)}
          </a>
        ) : null}
        <Choices label="rows" choices={KINDS} value={kind} onChange={(rows) => adjust({ rows, group: null, page: null, sort: null, desc: null, ...(rows === "groups" && all ? { step: null } : {}) })} />
        <div class="choices" role="group" aria-label="Open a sample of the step">
          <span class="label">open</span>
          <button type="button" onClick={() => void pick("reward", 0)}>worst</button>
          <button type="button" onClick={() => void pick("reward", 1)}>best</button>
          <button type="button" onClick={() => void pick("tokens", 1)}>longest</button>
        </div>
      </div>
      <div class="toolbar">
        <TextField label="Search" main wide value={asked.q ?? ""} placeholder="words of prompt or response, or &quot;in quotes&quot;" onChange={(q) => adjust({ q, page: null }, { replace: true })} />
        <TextField label="Filter" wide value={asked.where ?? ""} placeholder="reward<0.5 tokens>=100 status=truncated" onChange={(where) => adjust({ where, page: null }, { replace: true })} />
      </div>
      {problem ? <Notice problem>{problem}</Notice> : null}
      {steps.step.length > 1 ? <StepChart title={evaluation ? `reward of ${set}` : "reward of the steps"} steps={steps.step} values={steps.reward} current={step} onStep={toStep} /> : null}
      {steps.unreadable.map(({ step: number, problem: reason }) => (
        <Notice key={number} problem>
          Step {number}: {reason}
        </Notice>
      ))}
      {kind === "groups" ? <GroupRows run={run} set={set} step={step} hrefOf={hrefOf} /> : <SampleRows run={run} set={set} step={step} group={group} hrefOf={hrefOf} />}
    </>
  );
}

interface Listing {
  run: Run;
  set: string;
  step: number | null;
  hrefOf(changes: Readonly<Record<string, string | number | null>>): string;
}

function GroupRows({ run, set, step, hrefOf }: Listing) {
  const asked = query.value;
  const sort = asked.sort ?? "group";
  const descending = asked.desc === "1";
  const offset = whole(asked, "page") ?? 0;
  const reply = useReply<Groups>(
    step === null
      ? null
      : {
          path: `/api/runs/${encodeURIComponent(run.id)}/groups`,
          parameters: { set: set === "train" ? null : set, step, sort: sort === "group" ? null : sort, descending: descending ? 1 : null, q: asked.q, where: asked.where, offset: offset || null },
        },
    { hold: true },
  );
  const groups = reply.data;
  return (
    <>
      {reply.error ? <Notice problem>{reply.error}</Notice> : null}
      {groups ? (
        <>
          <Pages total={groups.total} offset={groups.offset} what="groups" took={groups.took} hrefOf={(page) => hrefOf({ page: page || null })} />
          {groups.group.length > 0 ? (
            <GroupsTable
              groups={groups}
              pending={reply.pending}
              sorting={{ sort, descending, hrefOf: (name, down) => hrefOf({ sort: name === "group" ? null : name, desc: down ? 1 : null }) }}
              hrefOf={(group) => hrefOf({ group, step: groups.step, sort: null, desc: null, q: null, where: null })}
            />
          ) : (
            <Notice>No group matches.</Notice>
          )}
          {groups.total > PAGE_LENGTH ? <Pages below total={groups.total} offset={groups.offset} what="groups" hrefOf={(page) => hrefOf({ page: page || null })} /> : null}
        </>
      ) : reply.error ? null : (
        <Waiting />
      )}
    </>
  );
}

function SampleRows({ run, set, step, group, hrefOf }: Listing & { group: number | null }) {
  const asked = query.value;
  const sort = asked.sort ?? "step";
  const descending = asked.desc === "1";
  const offset = whole(asked, "page") ?? 0;
  const reply = useReply<Samples>(
    {
      path: `/api/runs/${encodeURIComponent(run.id)}/samples`,
      parameters: { set: set === "train" ? null : set, step: step ?? "all", group, sort: sort === "step" ? null : sort, descending: descending ? 1 : null, q: asked.q, where: asked.where, offset: offset || null },
      // Of all steps there may be more with every step; one step does not change.
      ...(step === null ? { run: run.id, parts: [set === "train" ? "samples" : "evals"] as const } : {}),
    },
    { hold: true, unfinished: samplesUnfinished },
  );
  const samples = reply.data;
  const everyStep = step === null;
  return (
    <>
      {group !== null ? (
        <p class="crumbs">
          <a href={hrefOf({ group: null, rows: null })}>‹ all groups</a> <strong>group {group}</strong>{" "}
          {everyStep ? null : (
            <a href={hrefOf({ step: "all" })}>this prompt in all steps</a>
          )}
        </p>
      ) : null}
      {reply.error ? <Notice problem>{reply.error}</Notice> : null}
      {samples ? (
        <>
          <Pages total={samples.total} exact={samples.exact} offset={samples.offset} what="samples" took={samples.took} hrefOf={(page) => hrefOf({ page: page || null })} />
          {everyStep && samples.indexed < samples.rows ? (
            <p class="quiet" role="status">
              The search index holds {grouped(samples.indexed)} of {grouped(samples.rows)} samples so far; these are the results in them.
            </p>
          ) : null}
          {samples.at.length > 0 ? (
            <SamplesTable
              samples={samples}
              withStep={everyStep}
              pending={reply.pending}
              searched={!!asked.q}
              onePrompt={group !== null}
              sorting={{ sort, descending, hrefOf: (name, down) => hrefOf({ sort: name === "step" ? null : name, desc: down ? 1 : null }) }}
              hrefOf={({ step: number, index, part }) => href("sample", { set: set === "train" ? null : set, step: number, index, part: part || null })}
            />
          ) : (
            <Notice>No sample matches.</Notice>
          )}
          {samples.total > PAGE_LENGTH ? <Pages below total={samples.total} exact={samples.exact} offset={samples.offset} what="samples" hrefOf={(page) => hrefOf({ page: page || null })} /> : null}
        </>
      ) : reply.error ? null : (
        <Waiting />
      )}
    </>
  );
}

/** A reward as text. */
export function rewardText(reward: number | null): string {
  return reward === null ? "no reward" : `reward ${short(reward)}`;
}
