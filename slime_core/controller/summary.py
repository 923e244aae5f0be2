"""summary.json: the results of a run. Its presence marks the run as finished."""

from __future__ import annotations

import json
import time
from typing import Any

from slime_core import groups
from slime_core.atomic_io.atomic_file import write_text
from slime_core.config.bound import BoundRun
from slime_core.controller.session import Session


def write_summary(session: Session) -> dict[str, Any]:
    """{steps, seconds, tokens, eval: {before, after}, resolved}; and ended_early, the reason, if it did."""
    early = {} if session.ended_early is None else {"ended_early": session.ended_early}
    summary = {
        "steps": session.state.rollout_id,
        "seconds": round(session.state.seconds + time.perf_counter() - session.started, 3),
        "tokens": session.state.tokens,
        "eval": {"before": dict(session.state.eval_before), "after": session.accuracies(session.last_eval)},
        "resolved": resolved(session.run),
        **early,
    }
    write_text(session.folder.summary, json.dumps(summary, indent=2))
    return summary


def resolved(run: BoundRun) -> dict[str, str]:
    """The plugin of every name of the run, with its distribution and version."""
    found = {"algo": f"{run.algo.entry.qualified} {run.algo.entry.version}"}
    for part in run.parts:
        where = f"algo {groups.NOUNS[part.group]}" if part.where == "algo" else part.where
        found[where] = f"{part.entry.qualified} {part.entry.version}"
    return found
