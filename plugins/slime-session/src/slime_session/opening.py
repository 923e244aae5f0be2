"""`open_session` and `run`: a run file and overrides to a running session, or to a run that has ended. Both bind, check and
start a run as `slime run` does, with its errors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from slime_core.cli.invocation import Words, bind_invocation, warn
from slime_core.cli.training import start_options
from slime_core.controller.gc_control import gc_paused
from slime_core.errors import ConfigError
from slime_core.rollout.reward_process import PROCESS_NAME
from slime_session.reports import RunResult

# These import torch, which takes seconds: a mistake in the run file is reported before.
if TYPE_CHECKING:
    from slime_core.controller.run_inputs import RunInputs
    from slime_session.live_run import LiveRun
    from slime_session.session import TrainingSession


def open_session(
    run_file: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    observers: Mapping[str, object] | None = None,
    fresh: bool = False,
    resume: str | Path | None = None,
    ckpt_step: int | None = None,
    accept_changes: Sequence[str] = (),
) -> TrainingSession:
    """Starts trainers, engines and rewards of a run file, for a loop of one's own. Use it in a `with` statement.

    It begins or continues where `slime run` would: an unfinished run of this name, config and data continues from its newest
    checkpoint, and `slime run` continues what this session saves. `fresh`, `resume`, `ckpt_step` and `accept_changes` are the
    options of that command.

    overrides: dotted keys to values, as `--set` takes them, such as `{"train.lr": 1e-3}`; relative paths in them are relative
    to the working directory. observers: objects with hooks (`slime_core.contracts.hookspecs`), by a name for messages; they
    are called in the session's own thread.

    Raises ConfigError with all problems of the run file, and whatever else `slime run` reports before the first step.
    """
    from slime_session.adapter_loop import AdapterLoop
    from slime_session.engine_adapters import EngineAdapters
    from slime_session.own_loop import begin_loop
    from slime_session.session import TrainingSession
    from slime_session.trainer_states import TrainerStates

    live, inputs = started(run_file, overrides, observers, options(fresh, resume, ckpt_step, accept_changes))
    try:
        loop = live.do(lambda: begin_loop(live.session, inputs.renderers.get("data")))
    except BaseException as error:
        live.close(error)
        raise
    engines = EngineAdapters(live.session, loop.weights)
    return TrainingSession(live, loop, TrainerStates(loop), AdapterLoop(loop, engines), engines)


def run(
    run_file: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    observers: Mapping[str, object] | None = None,
    fresh: bool = False,
    resume: str | Path | None = None,
    ckpt_step: int | None = None,
    accept_changes: Sequence[str] = (),
) -> RunResult:
    """What `slime run` does, to its end; it prints no progress, which observers see. See `open_session`. An interrupt ends it
    at the next clean point: what was trained before is saved, and Interrupted names the folder."""
    from slime_core.cli.training import to_its_end

    live, _ = started(run_file, overrides, observers, options(fresh, resume, ckpt_step, accept_changes))
    session = live.session
    try:
        summary = live.do(lambda: to_its_end(session), interrupt=session.stop_requested.set)
    except BaseException as error:
        live.close(error)
        raise
    live.close()
    return RunResult(
        folder=session.folder.path,
        steps=summary["steps"],
        seconds=summary["seconds"],
        tokens=summary["tokens"],
        eval_before=summary["eval"]["before"],
        eval_after=summary["eval"]["after"],
        ended_early=summary.get("ended_early"),
        resolved=summary["resolved"],
    )


def started(
    run_file: str | Path,
    overrides: Mapping[str, Any] | None,
    observers: Mapping[str, object] | None,
    own: Mapping[str, str | bool],
) -> tuple[LiveRun, RunInputs]:
    require_guard()
    chosen = start_options(own)
    with gc_paused():
        bound = bind_invocation(Words(Path(run_file), own, override_words(overrides or {})))
        from slime_core.controller.run_inputs import load_run_inputs
        from slime_session.live_run import LiveRun

        inputs = load_run_inputs(bound)
    warn(inputs.notices())
    return LiveRun(bound, inputs, chosen, observers or {}), inputs


def require_guard() -> None:
    """ConfigError in a worker process that imports the program again, as multiprocessing does: it would open its own."""
    if multiprocessing.current_process().name == PROCESS_NAME:
        raise ConfigError(
            "rewards run in processes that import your program again, and it opened a session there. Put what it does below "
            'the line `if __name__ == "__main__":`.'
        )


def options(
    fresh: bool, resume: str | Path | None, ckpt_step: int | None, accept_changes: Sequence[str]
) -> dict[str, str | bool]:
    """As the words of `slime run` give them."""
    given: dict[str, str | bool | None] = {
        "fresh": fresh or None,
        "resume": None if resume is None else str(resume),
        "ckpt-step": None if ckpt_step is None else str(ckpt_step),
        "accept-changes": ",".join(accept_changes) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def override_words(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of `slime run` that set these keys.

    >>> override_words({"train.lr": 1e-3, "algo": "grpo", "train.num_epoch": None})
    ('--set', 'train.lr=0.001', '--set', 'algo="grpo"', '--train.num_epoch', 'none')
    >>> override_words({"rollout.use_fault_tolerance": True})
    ('--set', 'rollout.use_fault_tolerance=true')
    """
    words: list[str] = []
    for key, value in overrides.items():
        # TOML has no null.
        words += [f"--{key}", "none"] if value is None else ["--set", f"{key}={toml_text(value)}"]
    return tuple(words)


def toml_text(value: Any) -> str:
    table = tomlkit.inline_table()
    table.append("value", str(value) if isinstance(value, Path) else value)
    # By its key a table gives a plain bool, and an item of everything else.
    item = table["value"]
    text: str = str(item).lower() if isinstance(item, bool) else item.as_string()
    return text
