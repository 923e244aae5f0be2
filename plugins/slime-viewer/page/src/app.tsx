/** The page: header, runs, one view. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { takeToken } from "./address";
import type { PanelInfo, Run, Runs } from "./api";
import { Compare } from "./compare";
import { focusMainField } from "./controls";
import { Curves } from "./curves";
import { Health } from "./health";
import { Help, helpOpen } from "./help";
import { useShortcuts } from "./keyboard";
import { address, currentRun, open, overlaid, remember, tabHref, view } from "./navigation";
import { Notice, Waiting } from "./notice";
import { Panel } from "./panel";
import { connection, useReply } from "./replies";
import { Rollouts } from "./rollouts";
import { RunList, stateText } from "./run-list";
import { Sample } from "./sample";
import { nextTheme, themeChoice } from "./theme";
import { Timeline } from "./timeline";
import { setToken, token } from "./token";

const TABS = [
  { view: "curves", title: "Curves", key: "c" },
  { view: "rollouts", title: "Rollouts", key: "r" },
  { view: "timeline", title: "Timeline", key: "t" },
  { view: "health", title: "Health", key: "h" },
  { view: "evaluation", title: "Evaluation", key: "e" },
  { view: "compare", title: "Compare", key: "d" },
] as const;

const THEMES = { system: "auto", light: "light", dark: "dark" } as const;

export function App() {
  const reply = useReply<Runs>({ path: "/api/runs", run: "*", parts: ["run"] }, { hold: true });
  useEffect(() => remember(address.value), [address.value]);
  useShortcuts([
    { keys: "?", title: "these keys", run: () => (helpOpen.value = true) },
    { keys: "/", title: "filter or search", run: focusMainField },
    { keys: "t", title: "light, dark, or as the system", run: nextTheme },
    ...TABS.map((tab) => ({ keys: `g ${tab.key}`, title: tab.title, run: () => open(tabHref(tab.view)) })),
  ]);
  if (connection.value.denied) return <TokenForm />;
  const runs = reply.data?.runs ?? [];
  const current = runs.find((run) => run.id === currentRun.value) ?? runs[0];
  return (
    <>
      <a class="skip" href="#content" onClick={(event) => skip(event)}>
        Skip to content
      </a>
      <Header current={current} panels={reply.data?.panels ?? []} exported={reply.data?.exported ?? false} />
      {connection.value.lost ? <Notice problem>{connection.value.lost} Trying again.</Notice> : null}
      {reply.error && !reply.data ? <Notice problem>{reply.error}</Notice> : null}
      {reply.data === undefined ? reply.error ? null : <Waiting /> : current === undefined ? <Notice>No runs.</Notice> : <Body runs={runs} current={current} panels={reply.data.panels} />}
      <Help />
    </>
  );
}

/** The address is the view, so the link must not change it. */
function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

function Header({ current, panels, exported }: { current: Run | undefined; panels: readonly PanelInfo[]; exported: boolean }) {
  const shown = view.value === "sample" ? "rollouts" : view.value;
  const tabs = [...TABS.map((tab) => [tab.view, tab.title] as const), ...panels.map((panel) => [`panel/${panel.name}`, panel.title] as const)];
  return (
    <header>
      <h1>
        <a href={tabHref("curves")}>slime</a>
        {current ? (
          <>
            {" "}
            <span class="run-name" title={current.folder}>
              {current.id}
            </span>{" "}
            <span class={`state ${current.state}`}>{exported ? `exported, ${stateText(current)}` : stateText(current)}</span>
          </>
        ) : null}
      </h1>
      <nav aria-label="Views">
        {tabs.map(([name, title]) => (
          <a key={name} href={tabHref(name)} aria-current={name === shown ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      <div class="tools">
        <button type="button" onClick={nextTheme} aria-label={`Colors: ${THEMES[themeChoice.value]}`} title="Colors: as the system, light, dark (t)">
          {THEMES[themeChoice.value]}
        </button>
        <button type="button" onClick={() => (helpOpen.value = true)} aria-label="Keys" title="Keys (?)">
          ?
        </button>
      </div>
    </header>
  );
}

function Body({ runs, current, panels }: { runs: readonly Run[]; current: Run; panels: readonly PanelInfo[] }) {
  const over = overlaid.value;
  const ids = runs.map(({ id }) => id).join();
  // The same array while the same runs are shown: charts compare it.
  const shown = useMemo(() => [current, ...over.flatMap((id) => runs.filter((run) => run.id === id && run.id !== current.id))], [current.id, over, ids]);
  useEffect(() => {
    document.title = `${current.id} – ${view.value} – slime view`;
  }, [current.id, view.value]);
  return (
    <div class={runs.length > 1 ? "body many" : "body"}>
      {runs.length > 1 ? <RunList runs={runs} current={current} shown={shown} /> : null}
      <main id="content" tabIndex={-1}>
        {current.problem ? <Notice problem>{current.problem}</Notice> : null}
        {current.state === "empty" ? <Notice>{current.folder} holds no run yet. The page shows it when it begins.</Notice> : <View key={current.id} current={current} shown={shown} panels={panels} />}
      </main>
    </div>
  );
}

function View({ current, shown, panels }: { current: Run; shown: readonly Run[]; panels: readonly PanelInfo[] }) {
  switch (view.value) {
    case "curves":
      return <Curves runs={shown} />;
    case "rollouts":
      return <Rollouts run={current} />;
    case "evaluation":
      return <Rollouts key="evaluation" run={current} evaluation />;
    case "sample":
      return <Sample run={current} />;
    case "timeline":
      return <Timeline run={current} />;
    case "health":
      return <Health run={current} />;
    case "compare":
      return <Compare runs={shown} />;
  }
  const panel = panels.find(({ name }) => view.value === `panel/${name}`);
  return panel ? <Panel key={panel.name} run={current} info={panel} /> : <Notice>No view {view.value}. <a href={tabHref("curves")}>Curves</a></Notice>;
}

/** Without the token the server shows nothing of a run. */
function TokenForm() {
  const [text, setText] = useState("");
  return (
    <main class="door">
      <h1>slime view</h1>
      <p>This page requires the token of the running <code>slime view</code>. Open the address that it printed, or paste it here.</p>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          const mark = text.indexOf("#");
          setToken((mark < 0 ? null : takeToken(text.slice(mark)).token) ?? text.trim());
          location.reload();
        }}
      >
        <label>
          <span class="label">Address or token</span>
          <input type="text" value={text} autocomplete="off" spellcheck={false} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <button type="submit">Open</button>
      </form>
      {token.value !== null ? <p class="quiet">The token that this page had was refused: it is that of another start of slime view.</p> : null}
    </main>
  );
}
