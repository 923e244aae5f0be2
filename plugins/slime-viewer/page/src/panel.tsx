/** A panel of a plugin: its module draws into an element of the page. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { PanelData, PanelInfo, PanelModule, Run } from "./api";
import { Notice, Waiting } from "./notice";
import { api, useReply } from "./replies";

export function Panel({ run, info }: { run: Run; info: PanelInfo }) {
  const reply = useReply<PanelData>(
    { path: `/api/runs/${encodeURIComponent(run.id)}/panels/${encodeURIComponent(info.name)}`, run: run.id, parts: ["run", "metrics", "samples", "evals", "timeline", "events"] },
    { hold: true },
  );
  const host = useRef<HTMLDivElement>(null);
  const [module, setModule] = useState<PanelModule | null>(null);
  const [problem, setProblem] = useState<string | null>(null);

  useEffect(() => {
    let current = true;
    api()
      .panel(info.name)
      .then(
        (loaded) => current && setModule(loaded),
        (error: unknown) => current && setProblem(`Its module cannot be loaded: ${String(error)}`),
      );
    return () => {
      current = false;
    };
  }, [info.name]);

  useEffect(() => {
    const element = host.current;
    if (!element || !module || reply.data === undefined) return;
    let end: void | (() => void);
    try {
      end = module.default(element, reply.data.data);
      setProblem(null);
    } catch (error) {
      // A fault of a plugin must not take the page along.
      setProblem(`It failed while it was drawn: ${String(error)}`);
    }
    return () => {
      end?.();
      element.replaceChildren();
    };
  }, [module, reply.data]);

  return (
    <section class="panel" aria-labelledby="panel">
      <h2 id="panel">
        {info.title} <span class="quiet">{info.from}</span>
      </h2>
      {reply.error ? <Notice problem>{reply.error}</Notice> : null}
      {problem ? <Notice problem>Panel {info.name} of {info.from}: {problem}</Notice> : null}
      {(reply.data === undefined && !reply.error) || (module === null && !problem) ? <Waiting /> : null}
      <div ref={host} />
    </section>
  );
}
