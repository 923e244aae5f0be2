"""`slime run`: binds and checks the config, starts the run, runs the loop, prints the summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.atomic_io.storage import written
from slime_core.cli import BEGAN
from slime_core.cli.invocation import bind_invocation, parse_words, warn
from slime_core.cli.stop_signals import EarlyInterrupt, StopSignals
from slime_core.config.bound import BoundRun
from slime_core.controller.gc_control import gc_paused
from slime_core.controller.run_changes import ACCEPTABLE, ChangeKind
from slime_core.controller.start_folder import StartOptions
from slime_core.data.model_folder import copy_processor
from slime_core.errors import ConfigError, Interrupted, PluginError
from slime_core.registry.boundary import error_text

# The loop and the session import torch, which takes seconds: a mistake in the run file is reported before.
if TYPE_CHECKING:
    from slime_core.controller.run_inputs import RunInputs
    from slime_core.controller.session import Session

T = TypeVar("T")


def run_words(words: Sequence[str]) -> None:
    """`slime run` with these words. KeyboardInterrupt if it is interrupted before it starts."""
    with EarlyInterrupt() as early:
        run_command(words, early)


def run_command(words: Sequence[str], early: EarlyInterrupt) -> None:
    typed = parse_words(
        words,
        switches=("dry-run", "fresh", "debug", "quiet"),
        options=("resume", "ckpt-step", "replay-schedule", "accept-changes"),
        command="run",
    )
    options = start_options(typed.own)
    # Objects loaded here live as long as the run. Drivers that read the model's config import torch.
    with gc_paused():
        run = bind_invocation(typed)
        from slime_core.controller.run_inputs import load_run_inputs

        inputs = load_run_inputs(run)
    if options.replay is not None and options.fresh:
        removed = (Path(run.config.runs_dir) / run.config.name).resolve()
        if options.replay.resolve().is_relative_to(removed):
            raise ConfigError(f"--fresh removes {removed}, which holds the schedule to replay. Pass another --name.")
    warned = inputs.notices()
    warn(warned)
    if typed.own.get("dry-run"):
        print_dry_run(run, inputs, options)
        return
    run_to_end(train(run, inputs, options, early, quiet=bool(typed.own.get("quiet"))))
    # Rows that were checked when they were drawn.
    warn([notice for notice in inputs.notices() if notice not in warned])


def start_options(own: Mapping[str, str | bool]) -> StartOptions:
    """The command's own options. ConfigError for values that are not understood, and for options that exclude each other."""
    step = own.get("ckpt-step")
    if step is not None and not str(step).isdigit():
        raise ConfigError(f"--ckpt-step {step}: requires a number of rollout steps, such as 4 for checkpoints/step_4.")
    kinds = [] if "accept-changes" not in own else str(own["accept-changes"]).split(",")
    if unknown := set(kinds) - set(ACCEPTABLE):
        raise ConfigError(
            f"--accept-changes {','.join(kinds)}: {min(unknown)!r} cannot be accepted; pass {', '.join(ACCEPTABLE)}. Another "
            "key or other data are another run."
        )
    if own.get("fresh") and (
        other := next((name for name in ("resume", "ckpt-step", "accept-changes") if own.get(name) is not None), None)
    ):
        raise ConfigError(f"--fresh removes the run that --{other} would resume. Pass only one of the two.")
    resume, replay = own.get("resume"), own.get("replay-schedule")
    return StartOptions(
        fresh=bool(own.get("fresh")),
        resume=None if resume is None else Path(str(resume)),
        ckpt_step=None if step is None else int(str(step)),
        replay=None if replay is None else Path(str(replay)),
        accept=frozenset(map(ChangeKind, kinds)),
        began=BEGAN,
        report=(lambda line: None) if own.get("quiet") else (lambda line: print(f"note: {line}.", file=sys.stderr)),
    )


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, but SystemExit in a task, such as an agent's, ends only that task: who awaits it gets the exception,
    and names the plugin."""
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(work)
        while not task.done():
            with contextlib.suppress(SystemExit):
                runner.get_loop().run_until_complete(task)
        try:
            return task.result()
        except SystemExit as error:
            raise PluginError(f"a plugin ended the process: it raised {error_text(error)}.") from error


async def train(run: BoundRun, inputs: RunInputs, options: StartOptions, early: EarlyInterrupt, *, quiet: bool) -> None:
    from slime_core.cli.console import Console
    from slime_core.controller.startup import start

    # The heavy imports are done.
    early.raise_if_received()
    console = Console(run, quiet=quiet)
    with StopSignals() as signals:
        try:
            async with start(run, inputs, options, {"slime/console": console}) as session:
                signals.started(session.stop_requested)
                try:
                    summary = await to_its_end(session)
                except Interrupted as interrupted:
                    raise signals.interrupted(str(interrupted)) from None
        except asyncio.CancelledError:
            if not signals.received:
                raise
            raise signals.interrupted("interrupted while starting; nothing has changed.") from None
    console.sum_up(summary, session.folder)


async def to_its_end(session: Session) -> dict[str, Any]:
    """The loop, then hf/ and summary.json, whose content it returns. Interrupted if the run was asked to stop."""
    from slime_core.controller.loop import run_loop
    from slime_core.controller.summary import write_summary

    try:
        await run_loop(session)
    except Interrupted as interrupted:
        raise Interrupted(
            f"{interrupted}; {session.state.rollout_id} of {session.num_rollout} steps are done and saved in "
            f"{session.folder.path}. Start the same command again to continue."
        ) from None
    if session.run.config.checkpoint.save_hf:
        await export_hf(session)
    return write_summary(session)


async def export_hf(session: Session) -> None:
    """Writes hf/, and hf-ROLE/ for the other trained roles: models that transformers loads, with the tokenizer."""
    for name, trainers in session.roles.items():
        final = session.folder.hf if trainers is session.policy else session.folder.hf_of(name)
        # Written to a temporary folder first.
        aside = final.with_name(f".{final.name}.writing")
        with written(final):
            aside.mkdir(exist_ok=True)
        async with session.colocation.train(), trainers.turn():
            await trainers.call_all("save_hf", aside)
        before = final.with_name(f".{final.name}.old")
        with written(final):
            session.tokenizer.save_pretrained(aside)
            copy_processor(Path(session.run.config.model.hf_checkpoint), aside)
            if final.exists():
                shutil.rmtree(before, ignore_errors=True)
                final.rename(before)
            aside.rename(final)
        shutil.rmtree(before, ignore_errors=True)


def print_dry_run(run: BoundRun, inputs: RunInputs, options: StartOptions) -> None:
    """Prints the resolved run as JSON. Raises what a start would raise before it trains."""
    from slime_core.controller.startup import rehearse

    source = inputs.source
    manifest, place, state = rehearse(run, inputs, options)
    for line in place.notes:
        options.report(line)
    print(
        json.dumps(
            {
                "run": run.config.name,
                "folder": str(place.folder.path),
                "continues_from_step": None if state is None else state.rollout_id,
                "accepted_changes": [str(change) for change in place.accepted],
                "steps": inputs.num_rollout,
                "optimizer_steps": inputs.num_rollout * run.steps_per_rollout,
                "rollouts_per_step": run.rollouts_per_batch,
                "global_batch_size": run.global_batch_size,
                "trainer_ranks": {role.name: role.num_ranks for role in run.roles},
                "engines": run.config.launcher.num_engines,
                "rows": None if source is None else source.num_rows,
                "eval_rows": {name: found.num_rows for name, found in inputs.eval_sources.items()},
                "data": {} if source is None else dict(source.metrics),
                "needs": sorted(run.algo.needs),
                "plugins": dict(manifest.plugins),
                "fingerprint": manifest.fingerprint,
            },
            indent=2,
        )
    )
