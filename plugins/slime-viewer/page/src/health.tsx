/** Is the run well? Findings, the metrics to look at, memory, events. */

import type { Events, Health as HealthReply, MetricNames, Run } from "./api";
import { changed, formatAddress, whole } from "./address";
import { MetricChart } from "./curves";
import { chartsOf } from "./metric-groups";
import { href, query, view } from "./navigation";
import { Notice, Waiting } from "./notice";
import { bytes, grouped, moment } from "./number-format";
import { Pages, PAGE_LENGTH } from "./pages";
import { useReply } from "./replies";
import { useMemo } from "preact/hooks";

export function Health({ run }: { run: Run }) {
  const path = `/api/runs/${encodeURIComponent(run.id)}`;
  const reply = useReply<HealthReply>({ path: `${path}/health`, run: run.id, parts: ["metrics", "events"] }, { hold: true });
  const names = useReply<MetricNames>({ path: `${path}/metrics`, run: run.id, parts: ["metrics"] }, { hold: true });
  const charts = useMemo(() => chartsOf(names.data?.metrics ?? []), [names.data]);
  const runs = useMemo(() => [run], [run]);
  if (reply.error && !reply.data) return <Notice problem>{reply.error}</Notice>;
  if (!reply.data) return <Waiting />;
  const health = reply.data;
  return (
    <>
      <Findings health={health} />
      <dl class="facts">
        {(
          [
            ["skipped steps", health.skipped_steps],
            ["failed samples", health.failed_samples],
            ["engines lost", health.engines_lost],
            ["attempts", run.attempts],
          ] as const
        ).map(([name, count]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{grouped(count)}</dd>
          </div>
        ))}
      </dl>
      <div class="charts">
        {health.charts.flatMap(({ title, metrics }) =>
          charts
            .filter((chart) => metrics.includes(chart.main) || metrics.includes(chart.name))
            .map((chart) => <MetricChart key={`${title}/${chart.name}`} plan={chart} runs={runs} above={title} />),
        )}
      </div>
      <Memory health={health} />
      <EventRows run={run} />
    </>
  );
}

function Findings({ health }: { health: HealthReply }) {
  if (health.findings.length === 0) return <p class="well">Nothing to report.</p>;
  return (
    <ul class="findings" aria-label="Findings">
      {health.findings.map(({ level, text, metric, step }, place) => (
        <li key={place} class={level}>
          <b>{level}</b> <span>{text}</span>
          {metric ? <a href={href("curves", { metric })}>{metric}</a> : null}
          {step !== null ? <a href={href("rollouts", { step })}>step {grouped(step)}</a> : null}
        </li>
      ))}
    </ul>
  );
}

function Memory({ health }: { health: HealthReply }) {
  if (health.memory.length === 0 && health.memory_note === null) return null;
  const most = Math.max(1, ...health.memory.flatMap(({ planned, measured, limit }) => [planned ?? 0, measured ?? 0, limit ?? 0]));
  return (
    <section class="group">
      <h2>Memory: plan beside measured</h2>
      {health.memory_note ? <p class="quiet">{health.memory_note}</p> : null}
      {health.memory.length > 0 ? (
        <div class="table" role="region" aria-label="Memory" tabIndex={0}>
          <table class="narrow">
            <thead>
              <tr>
                <th scope="col" class="text">on</th>
                <th scope="col" class="number">planned</th>
                <th scope="col" class="number">measured</th>
                <th scope="col" class="number">limit</th>
                <th scope="col" class="text">shares</th>
              </tr>
            </thead>
            <tbody>
              {health.memory.map(({ what, planned, measured, limit }) => (
                <tr key={what}>
                  <th scope="row" class="text">{what}</th>
                  <td class="number">{bytes(planned)}</td>
                  <td class="number">{bytes(measured)}</td>
                  <td class="number">{bytes(limit)}</td>
                  <td>
                    <svg class="bars" width="180" height="18" aria-hidden="true">
                      {limit !== null ? <line class="limit" x1={(limit / most) * 176} x2={(limit / most) * 176} y1="0" y2="18" /> : null}
                      <rect class="planned" x="0" y="2" width={((planned ?? 0) / most) * 176} height="6" />
                      <rect class="measured" x="0" y="10" width={((measured ?? 0) / most) * 176} height="6" />
                    </svg>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
    </section>
  );
}

function EventRows({ run }: { run: Run }) {
  const offset = whole(query.value, "page") ?? 0;
  const reply = useReply<Events>(
    { path: `/api/runs/${encodeURIComponent(run.id)}/events`, parameters: { offset: offset || null, limit: PAGE_LENGTH }, run: run.id, parts: ["events"] },
    { hold: true },
  );
  const events = reply.data;
  return (
    <section class="group">
      <h2>Events</h2>
      {reply.error ? <Notice problem>{reply.error}</Notice> : null}
      {events ? (
        <>
          <Pages total={events.total} offset={events.offset} what="events" hrefOf={(page) => formatAddress({ view: view.value, query: changed(query.value, { page: page || null }) })} />
          {events.time.length > 0 ? (
            <div class="table" role="region" aria-label="Events" tabIndex={0}>
              <table>
                <thead>
                  <tr>
                    <th scope="col" class="text">time</th>
                    <th scope="col" class="number">attempt</th>
                    <th scope="col" class="number">step</th>
                    <th scope="col" class="text">event</th>
                    <th scope="col" class="text">what happened</th>
                  </tr>
                </thead>
                <tbody>
                  {events.time.map((time, row) => (
                    <tr key={`${events.total - events.offset - row}`}>
                      <td class="time">{moment(time)}</td>
                      <td class="number">{events.attempt[row]}</td>
                      <td class="number">{events.step[row] ?? ""}</td>
                      <td>{events.event[row]}</td>
                      <td class="sentence">{events.text[row]}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          ) : null}
        </>
      ) : reply.error ? null : (
        <Waiting />
      )}
    </section>
  );
}
