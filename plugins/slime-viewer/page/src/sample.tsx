/** One sample, turn by turn: prompt, tools, response with its tokens, reward with its parts. */

import { useMemo } from "preact/hooks";
import { whole } from "./address";
import type { Call, Message, Run, Sample as SampleReply, SampleKey } from "./api";
import { Select } from "./controls";
import { useShortcuts } from "./keyboard";
import { neighborsOf } from "./listing";
import { adjust, href, open, query } from "./navigation";
import { Notice, Waiting } from "./notice";
import { duration, grouped, short } from "./number-format";
import { useReply } from "./replies";
import { rewardText } from "./rollouts";
import { TokenText } from "./token-text";
import { Legend } from "./token-legend";
import { scaleOf } from "./token-scale";

export function Sample({ run }: { run: Run }) {
  const asked = query.value;
  const set = asked.set ?? "train";
  const index = whole(asked, "index");
  const reply = useReply<SampleReply>(
    index === null
      ? null
      : {
          path: `/api/runs/${encodeURIComponent(run.id)}/sample`,
          parameters: { set: set === "train" ? null : set, step: asked.step, index, part: whole(asked, "part") || null },
        },
    { hold: true },
  );
  if (index === null) return <Notice>No sample is chosen. <a href={href("rollouts")}>Rollouts</a></Notice>;
  if (reply.error && !reply.data) return <Notice problem>{reply.error}</Notice>;
  if (!reply.data) return <Waiting />;
  return <SampleView sample={reply.data} pending={reply.pending} />;
}

function sampleHref(sample: SampleReply, { step, index, part }: SampleKey): string {
  return href("sample", { set: sample.set === "train" ? null : sample.set, step, index, part: part || null, color: query.value.color ?? null, numbers: query.value.numbers ?? null });
}

function SampleView({ sample, pending }: { sample: SampleReply; pending: boolean }) {
  const asked = query.value;
  const { columns } = sample.tokens;
  const column = asked.color === "none" ? undefined : (columns.find(({ name }) => name === asked.color) ?? columns.find(({ name, values }) => name === "advantage" && values.some((value) => value !== null)) ?? columns.find(({ name }) => name === "rollout_log_prob") ?? columns[0]);
  const scale = useMemo(() => (column ? scaleOf(column) : null), [column]);
  const numbers = asked.numbers === "1";
  const neighbors = neighborsOf(sample.at);
  const at = sample.siblings.findIndex(({ at: key }) => key.index === sample.at.index && key.part === sample.at.part);
  const follow = (key: SampleKey | null | undefined) => key && open(sampleHref(sample, key));
  const list = neighbors?.address ?? href(sample.set === "train" ? "rollouts" : "evaluation", { step: sample.at.step, set: sample.set === "train" ? null : sample.set });

  const recolor = (by: number) => {
    const choices = [...columns.map(({ name }) => name), "none"];
    const place = choices.indexOf(column?.name ?? "none");
    adjust({ color: choices[(place + by + choices.length) % choices.length]! }, { replace: true });
  };
  useShortcuts([
    { keys: "n", title: "next sample of the list", run: () => follow(neighbors?.behind) },
    { keys: "p", title: "sample before in the list", run: () => follow(neighbors?.before) },
    { keys: ".", title: "next sample of the group", run: () => follow(sample.siblings[at + 1]?.at) },
    { keys: ",", title: "sample before in the group", run: () => follow(sample.siblings[at - 1]?.at) },
    { keys: "c", title: "next coloring of tokens", run: () => recolor(1) },
    { keys: "C", title: "coloring before", run: () => recolor(-1) },
    { keys: "#", title: "numbers beside tokens", run: () => adjust({ numbers: numbers ? null : 1 }, { replace: true }) },
    { keys: "u", title: "back to the list", run: () => open(list) },
  ]);

  return (
    <article class={pending ? "sample pending" : "sample"} aria-busy={pending}>
      <nav class="crumbs" aria-label="Place of the sample">
        <a href={list}>‹ {neighbors ? "list" : sample.set === "train" ? "rollouts" : sample.set}</a>
        {neighbors ? (
          <>
            {neighbors.before ? <a href={sampleHref(sample, neighbors.before)} rel="prev">previous</a> : null}
            <span class="quiet">
              {neighbors.place + 1} of {neighbors.count}
            </span>
            {neighbors.behind ? <a href={sampleHref(sample, neighbors.behind)} rel="next">next</a> : null}
          </>
        ) : null}
      </nav>
      <h2>
        sample {sample.at.index}
        {sample.at.part > 0 ? `.${sample.at.part}` : ""} <span class="quiet">step {grouped(sample.at.step)}</span>
      </h2>
      <Facts sample={sample} />
      <Siblings sample={sample} />
      <Prompt sample={sample} />
      <section aria-labelledby="response">
        <div class="toolbar">
          <h3 id="response">Response</h3>
          {sample.tokens.text !== null ? (
            <>
              <Select label="Color by" value={column?.name ?? "none"} choices={[...columns.map(({ name, title }) => [name, title] as const), ["none", "nothing"]]} onChange={(name) => adjust({ color: name }, { replace: true })} />
              <label class="check">
                <input type="checkbox" checked={numbers} onChange={() => adjust({ numbers: numbers ? null : 1 }, { replace: true })} /> numbers
              </label>
              {column && scale ? <Legend column={column} scale={scale} /> : null}
            </>
          ) : null}
        </div>
        {sample.tokens.problem ? <Notice>{sample.tokens.problem}</Notice> : null}
        <TokenText sample={sample} column={column} scale={scale} numbers={numbers} />
      </section>
      <Numbers title="Rewards of spans" rows={sample.span_rewards.map(({ start, end, value }) => [`tokens ${grouped(start)} to ${grouped(end)}`, short(value)])} />
      {sample.calls && sample.calls.length > 0 ? <Calls calls={sample.calls} /> : null}
      {isShort(sample.label) ? null : <Json title="Label" value={sample.label} />}
      <Json title="Metadata" value={sample.metadata} />
    </article>
  );
}

function Facts({ sample }: { sample: SampleReply }) {
  const trained = sample.tokens.columns.find(({ name }) => name === "mask")?.values.reduce<number>((sum, value) => sum + (value ?? 0), 0);
  const facts: (readonly [string, string])[] = [
    ["reward", short(sample.reward)],
    ...Object.entries(sample.parts).map(([name, value]) => [name, short(value)] as const),
    ...(sample.label !== null && isShort(sample.label) ? [["label", String(sample.label)] as const] : []),
    ["status", sample.status],
    ["tokens", grouped(sample.tokens.ids.length)],
    ...(trained !== undefined && trained !== sample.tokens.ids.length ? [["trained", grouped(trained)] as const] : []),
    ...Object.entries(sample.counts).map(([name, value]) => [name, short(value)] as const),
    ...(sample.origin ? [["from", sample.origin.slice(sample.origin.lastIndexOf("/") + 1)] as const] : []),
  ];
  return (
    <>
      <dl class="facts">
        {facts.map(([name, value], place) => (
          <div key={`${name}${place}`} class={place === 0 ? "main" : ""} title={name === "from" ? sample.origin : undefined}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {sample.trains ? null : <Notice>This sample counts in its group and trains nothing.</Notice>}
    </>
  );
}

/** Fits between the numbers. */
function isShort(value: unknown): boolean {
  return typeof value !== "object" && String(value).length <= 80;
}

/** The samples of the group, each with its reward. */
function Siblings({ sample }: { sample: SampleReply }) {
  if (sample.siblings.length < 2) return null;
  const own = (key: SampleKey) => key.index === sample.at.index && key.part === sample.at.part;
  return (
    <nav class="siblings" aria-label={`Samples of group ${sample.group}`}>
      <a class="quiet" href={href(sample.set === "train" ? "rollouts" : "evaluation", { set: sample.set === "train" ? null : sample.set, step: sample.at.step, group: sample.group })}>
        group {sample.group}
      </a>
      {sample.siblings.map(({ at, reward, tokens, status }) => (
        <a key={`${at.index}.${at.part}`} href={sampleHref(sample, at)} aria-current={own(at) ? "true" : undefined} title={`sample ${at.index}: ${rewardText(reward)}, ${grouped(tokens)} tokens, ${status}`}>
          {short(reward)}
        </a>
      ))}
    </nav>
  );
}

function Prompt({ sample }: { sample: SampleReply }) {
  const { messages, text, tools, tokens, images } = sample.prompt;
  const facts = [`${grouped(tokens)} tokens`, ...(images > 0 ? [`${grouped(images)} images`] : [])].join(", ");
  return (
    <section aria-labelledby="prompt">
      <h3 id="prompt">
        Prompt <span class="quiet">{facts}</span>
      </h3>
      {messages ? messages.map((message, place) => <MessageView key={place} message={message} />) : <div class="message"><pre>{text}</pre></div>}
      {tools && tools.length > 0 ? <Json title={`Tools (${tools.length})`} value={tools} /> : null}
      {messages ? (
        <details class="json">
          <summary>As the model reads it</summary>
          <pre tabIndex={0}>{text}</pre>
        </details>
      ) : null}
    </section>
  );
}

function MessageView({ message }: { message: Message }) {
  const { role, content, ...more } = message;
  const rest = Object.entries(more).filter(([, value]) => value !== null && value !== undefined);
  return (
    <div class="message">
      <span class="role">{role}</span>
      <pre>{contentText(content)}</pre>
      {rest.map(([name, value]) => (
        <Json key={name} title={name} value={value} />
      ))}
    </div>
  );
}

/** Text of a message; parts that are no text are named. */
function contentText(content: unknown): string {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content
    .map((part: unknown) => {
      if (typeof part === "string") return part;
      if (typeof part === "object" && part !== null && "text" in part && typeof part.text === "string") return part.text;
      if (typeof part === "object" && part !== null && "type" in part) return `[${String(part.type)}]`;
      return JSON.stringify(part);
    })
    .join("\n");
}

function Json({ title, value }: { title: string; value: unknown }) {
  if (value === null || value === undefined || (typeof value === "object" && Object.keys(value).length === 0)) return null;
  if (typeof value !== "object") {
    const text = String(value);
    if (text.length <= 200)
      return (
        <dl class="facts">
          <div>
            <dt>{title.toLowerCase()}</dt>
            <dd>{text}</dd>
          </div>
        </dl>
      );
  }
  return (
    <details class="json">
      <summary>{title}</summary>
      <pre tabIndex={0}>{typeof value === "string" ? value : JSON.stringify(value, null, 2)}</pre>
    </details>
  );
}

function Numbers({ title, rows }: { title: string; rows: readonly (readonly [string, string])[] }) {
  if (rows.length === 0) return null;
  return (
    <section>
      <h3>{title}</h3>
      <dl class="facts">
        {rows.map(([name, value], place) => (
          <div key={place}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function Calls({ calls }: { calls: readonly Call[] }) {
  return (
    <section>
      <h3>Calls of the engine</h3>
      <div class="table" role="region" aria-label="Calls of the engine" tabIndex={0}>
        <table class="narrow">
          <thead>
            <tr>
              {["call", "queue", "generate", "prompt tokens", "cached", "tokens", "engine", "ended by"].map((name) => (
                <th key={name} scope="col" class={name === "ended by" ? "text" : "number"}>{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {calls.map((call, place) => (
              <tr key={place}>
                <td class="number">{place + 1}</td>
                <td class="number">{duration(call.queue)}</td>
                <td class="number">{duration(call.generate)}</td>
                <td class="number">{grouped(call.prompt_tokens)}</td>
                <td class="number">{grouped(call.cached_tokens)}</td>
                <td class="number">{grouped(call.tokens)}</td>
                <td class="number">{call.engine}</td>
                <td>{call.finish}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
