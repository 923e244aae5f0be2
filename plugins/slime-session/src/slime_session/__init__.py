"""slime as a library: a loop of one's own over a run, and whole runs from Python."""

from slime_session.adapter import Adapter, Snapshot
from slime_session.datum import Datum
from slime_session.opening import open_session, run
from slime_session.reports import OptimizerStepReport, RunResult
from slime_session.session import TrainingSession

__all__ = [
    "Adapter",
    "Datum",
    "OptimizerStepReport",
    "RunResult",
    "Snapshot",
    "TrainingSession",
    "open_session",
    "run",
]
