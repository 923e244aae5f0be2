"""summary.json: what came out of a run. Its presence marks the run as finished."""

from __future__ import annotations

import json
import time
from typing import Any

from slime_core.buffer.atomic_file import write_text
from slime_core.session import Session
from slime_core.types.report import EvalReport


def write_summary(session: Session) -> dict[str, Any]:
    """{steps, seconds, tokens, eval: {before, after}, resolved}."""
    names = [settings.name for settings in session.run.evals]
    summary = {
        "steps": session.state.rollout_id,
        "seconds": round(session.state.seconds + time.perf_counter() - session.started, 3),
        "tokens": session.state.tokens,
        "eval": {"before": accuracies(session.first_eval, names), "after": accuracies(session.last_eval, names)},
        "resolved": {part.where: f"{part.entry.qualified} {part.entry.version}" for part in session.run.parts},
    }
    write_text(session.folder.summary, json.dumps(summary, indent=2))
    return summary


def accuracies(report: EvalReport | None, names: list[str]) -> dict[str, float]:
    return {} if report is None else {name: report.metrics[f"eval/{name}"] for name in names}
