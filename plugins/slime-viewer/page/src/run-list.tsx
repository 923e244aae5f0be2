/** The runs: which one the page is about, and which are laid over it. */

import { useState } from "preact/hooks";
import { joined } from "./address";
import type { Run } from "./api";
import { matches } from "./metric-groups";
import { adjust, overlaid, query, view } from "./navigation";
import { changed, formatAddress } from "./address";
import { duration, grouped } from "./number-format";
import { seriesColor } from "./palette";
import { theme } from "./theme";

/** Pixels: on narrower screens the list is closed until it is needed, as page.css has it. */
const NARROW = 720;
/** Runs from which on the list has a filter. */
const MANY = 8;

export function RunList({ runs, current, shown }: { runs: readonly Run[]; current: Run; shown: readonly Run[] }) {
  const [filter, setFilter] = useState("");
  const over = overlaid.value;
  const toggle = (run: Run) => {
    const next = over.includes(run.id) ? over.filter((id) => id !== run.id) : [...over, run.id];
    adjust({ over: joined(next), run: current.id });
  };
  const others = runs.filter((run) => run.id !== current.id);
  return (
    <aside aria-label="Runs" class="runs">
      <details open={innerWidth > NARROW}>
      <summary>
        <h2>Runs</h2> <span class="quiet">{runs.length}</span>
      </summary>
      {runs.length >= MANY ? (
        <input type="search" aria-label="Filter runs" placeholder="filter" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
      ) : null}
      <ul>
        {runs.map((run) => {
          if (!matches(run.id, filter) && run.id !== current.id) return null;
          const place = shown.findIndex(({ id }) => id === run.id);
          const own = run.id === current.id;
          return (
            <li key={run.id} class={own ? "current" : ""}>
              <input
                type="checkbox"
                checked={place >= 0}
                disabled={own}
                aria-label={`Lay ${run.id} over`}
                onChange={() => toggle(run)}
                style={{ accentColor: place >= 0 ? seriesColor(place, theme.value) : undefined }}
              />
              <span class="mark" style={{ color: place >= 0 ? seriesColor(place, theme.value) : undefined }}>
                {place >= 0 && shown.length > 1 ? place + 1 : ""}
              </span>
              <a href={runHref(run, current)} aria-current={own ? "true" : undefined} title={`${run.folder}\n${stateText(run)}`}>
                {run.id}
              </a>
              <span class={`state ${run.state}`}>
                {run.steps === run.num_rollout || run.num_rollout === null ? grouped(run.steps) : `${grouped(run.steps)}/${grouped(run.num_rollout)}`}
              </span>
            </li>
          );
        })}
      </ul>
      {others.length > 1 ? (
        <div class="choices">
          <button type="button" onClick={() => adjust({ over: joined(others.filter((run) => matches(run.id, filter)).map(({ id }) => id)), run: current.id })}>all</button>
          <button type="button" onClick={() => adjust({ over: null, run: current.id })}>only {current.id}</button>
        </div>
      ) : null}
    </details>
    </aside>
  );
}

/** Another run in the same view; the former one stays in the picture if runs are laid over. */
function runHref(run: Run, current: Run): string {
  const over = overlaid.value.filter((id) => id !== run.id);
  const kept = overlaid.value.length > 0 ? [current.id, ...over.filter((id) => id !== current.id)] : [];
  const shownView = view.value === "sample" ? "rollouts" : view.value;
  const base = view.value === "curves" ? query.value : {};
  return formatAddress({ view: shownView, query: changed(base, { run: run.id, over: joined(kept) }) });
}

export function stateText(run: Run): string {
  const steps = run.num_rollout === null ? `${grouped(run.steps)} steps` : `${grouped(run.steps)} of ${grouped(run.num_rollout)}`;
  return run.state === "empty" ? "empty" : `${run.state}, ${steps}${leftText(run)}`;
}

/** How long a run that continues will take, if its steps stay as the last ones were. */
function leftText(run: Run): string {
  if (run.state !== "running" || run.num_rollout === null || run.step_seconds === null) return "";
  return `, about ${duration((run.num_rollout - run.steps) * run.step_seconds)} left`;
}
