"""Errors that pass from one process to another."""

from __future__ import annotations

import pickle
import traceback
from typing import Final

from slime_core.errors import SlimeError
from slime_core.registry.boundary import error_text, held
from slime_core.rollout.reward_process import RemoteTraceback

MOST_LINES: Final = 40
"""Of a traceback, the innermost: the one of an error that is raised again and again has all of them."""


class WorkerError(SlimeError):
    """An error of a worker that is no SlimeError and cannot be pickled."""


def packed(error: Exception) -> Exception:
    """A copy, with the error's traceback as its cause's text; its text alone if it cannot be pickled. The error itself keeps
    what it has: all requests of engines that are given up raise one and the same."""
    text = "".join(traceback.format_exception(error, limit=-MOST_LINES))
    with held() as failed:
        # Some exceptions can be pickled but not unpickled.
        copy: Exception = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    if failed.error is not None:
        copy = WorkerError(error_text(error))
    copy.add_note(text)
    return copy


def raised_here(error: Exception) -> Exception:
    """A packed error as it is raised in this process."""
    notes = getattr(error, "__notes__", None)
    if notes:
        error.__cause__ = RemoteTraceback(notes.pop())
    return error
