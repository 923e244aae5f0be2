"""Errors that pass from one process to another."""

from __future__ import annotations

import pickle
import traceback

from slime_core.errors import SlimeError
from slime_core.registry.boundary import error_text, held
from slime_core.rollout.reward_process import RemoteTraceback


class WorkerError(SlimeError):
    """An error of a worker that is no SlimeError and cannot be pickled."""


def packed(error: Exception) -> Exception:
    """The error, with its traceback as its cause's text; its text alone if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    with held() as failed:
        # Some exceptions can be pickled but not unpickled.
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    kept = error if failed.error is None else WorkerError(error_text(error))
    kept.add_note(text)
    return kept


def raised_here(error: Exception) -> Exception:
    """A packed error as it is raised in this process."""
    notes = getattr(error, "__notes__", None)
    if notes:
        error.__cause__ = RemoteTraceback(notes.pop())
    return error
