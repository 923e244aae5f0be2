"""The boundary to foreign code: plugins, users' files, and the libraries under them. No other module catches whatever is
raised. What foreign code raises becomes a SlimeError with the plugin's name; a SlimeError passes unchanged."""

from __future__ import annotations

import contextlib
import re
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from slime_core.atomic_io.storage import FULL, storage_error
from slime_core.errors import PluginError, SlimeError, StorageError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
NAME: Final = "__slime_plugin__"
KERNEL_FOLDER: Final = Path(__file__).parents[1]
NUM_FRAMES: Final = 3
LONGEST_TEXT: Final = 1000
LONGEST_VALUE: Final = 80


def with_name(thing: T, name: str) -> T:
    """Attaches the name that messages have for it: `group filter "mine.py/short"`. Objects that take no attributes get none."""
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(thing, NAME, name)
    return thing


def name_of(plugin: object) -> str:
    """The attached name; else its contract and its class, such as `group filter Short`. A text is a name already."""
    if (name := plugin if isinstance(plugin, str) else getattr(plugin, NAME, None)) is not None:
        return str(name)
    contract = next((c.__name__ for c in type(plugin).__mro__ if c.__module__.startswith("slime_core.contracts.")), "")
    noun = re.sub(r"(?<!^)(?=[A-Z])", " ", contract).lower()
    return f"{noun} {type(plugin).__name__}".strip()


@contextlib.contextmanager
def foreign(plugin: object, call: str, *, error: type[SlimeError] = PluginError) -> Iterator[None]:
    """For a block that calls foreign code, and may await it. call: the method and what it is called on, such as `decide on
    train.jsonl, line 3`; error: the class of what is raised, with the original as its cause. A full disk raises
    StorageError. Cancellations by the run pass; others are errors of the plugin."""
    try:
        yield
    except (SlimeError, GeneratorExit):
        raise
    except BaseException as raised:
        if is_own_stop(raised):
            raise
        raise_as(error, f"{name_of(plugin)}, {call}", raised)


def raise_as(error: type[SlimeError], where: str, raised: BaseException, fix: str = "") -> NoReturn:
    if isinstance(raised, StorageError):
        raise raised
    if isinstance(raised, OSError) and raised.errno in FULL:
        raise storage_error(Path(raised.filename or "."), raised) from raised
    if was_cancelled(raised):
        # Raised as it is, it would end the run like an interrupt.
        raise error(
            f"{where}: what it awaited was cancelled, there or in what it calls, and not by the run."
        ) from raised
    raise error(f"{where}: raised {error_text(raised)}.{fix and ' ' + fix}") from raised


@dataclass(slots=True)
class Held:
    error: Exception | None = None
    """None: nothing was raised. SystemExit and the like are replaced by a PluginError, so that they end nothing else."""
    raised: BaseException | None = None
    """What was raised."""


@contextlib.contextmanager
def held() -> Iterator[Held]:
    """Holds what the block raises, for a caller that hands it to those who wait for the block. A stop by the run passes."""
    kept = Held()
    try:
        yield kept
    except BaseException as raised:
        if isinstance(raised, GeneratorExit) or is_own_stop(raised):
            raise
        kept.raised = raised
        kept.error = (
            raised if isinstance(raised, Exception) else PluginError(f"foreign code raised {error_text(raised)}")
        )


def is_own_stop(raised: BaseException) -> bool:
    """True for a cancellation by the run, and for Ctrl-C. A running run handles Ctrl-C as a signal, and reward workers ignore
    it: there only foreign code raises KeyboardInterrupt."""
    if was_cancelled(raised):
        task = running_task()
        return task is None or task.cancelling() > 0
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return isinstance(raised, KeyboardInterrupt) and running_task() is None and not ignored


def was_cancelled(raised: BaseException) -> bool:
    # Imported late, because a listing of plugins needs no event loop: a sixth of its time.
    from asyncio import CancelledError

    return isinstance(raised, CancelledError)


def running_task() -> asyncio.Task[object] | None:
    import asyncio

    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def error_text(raised: BaseException) -> str:
    """`ValueError: no digits (mine.py:12 in keep)`: the error and the last lines of foreign code that it passed."""
    try:
        text = re.sub(r"\n\s*\n", "\n", str(raised).strip()).removesuffix(".")
    except Exception:
        text = "its text cannot be shown"
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}…"
    return f"{type(raised).__name__}{f': {text}' if text else ''}{lines_of(raised)}"


def lines_of(raised: BaseException) -> str:
    frames = traceback.extract_tb(raised.__traceback__)
    passed = [
        frame
        for before, frame in zip([None, *frames], frames, strict=False)
        if not Path(frame.filename).is_relative_to(KERNEL_FOLDER)
        and frame.filename != contextlib.__file__
        # Whose block it is, a collector for example, calls foreign code.
        and (before is None or (before.filename, before.name) != (__file__, foreign.__name__))
    ]
    # An error that is raised again passes a line again.
    lines = dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in passed)
    return f" ({' > '.join([*lines][-NUM_FRAMES:])})" if lines else ""


def shown(value: object) -> str:
    """A short text for a foreign value, whatever its own `repr` does."""
    try:
        text = repr(value)
    except Exception:
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def require(fits: bool, plugin: object, call: str, value: object, required: str) -> None:
    """PluginError unless `value`, which a call returned, fits."""
    if not fits:
        found = f"shape {tuple(shape)}" if (shape := getattr(value, "shape", None)) is not None else shown(value)
        raise PluginError(f"{name_of(plugin)}, {call}: returned {found}; {required} is required.")
