"""What `slime run` does: bind, check, start, loop, sum up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_core.cli.console import Console
from slime_core.cli.invocation import bind_invocation, take_apart
from slime_core.config.bound import BoundRun
from slime_core.errors import ConfigError, Interrupted
from slime_core.loop import run_loop
from slime_core.materials import Materials, load_materials
from slime_core.session import Session
from slime_core.startup import StartOptions, start
from slime_core.summary import write_summary


def run_words(words: Sequence[str]) -> None:
    """`slime run` with these words."""
    typed = take_apart(
        words, switches=("dry-run", "fresh", "debug", "quiet"), options=("resume", "ckpt-step"), command="run"
    )
    run = bind_invocation(typed)
    materials = load_materials(run)
    if typed.own.get("dry-run"):
        print_dry_run(run, materials)
        return
    step = typed.own.get("ckpt-step")
    if step is not None and not str(step).isdigit():
        raise ConfigError(
            f'--ckpt-step {step}: a number of rollout steps is wanted; "slime run" lists those there are.'
        )
    resume = typed.own.get("resume")
    options = StartOptions(
        fresh=bool(typed.own.get("fresh")),
        resume=None if resume is None else Path(str(resume)),
        ckpt_step=None if step is None else int(str(step)),
    )
    asyncio.run(train(run, materials, options, quiet=bool(typed.own.get("quiet"))))


async def train(run: BoundRun, materials: Materials, options: StartOptions, *, quiet: bool) -> None:
    console = Console(run, quiet=quiet)
    async with start(run, materials, options, {"slime/console": console}) as session:
        listen_for_signals(session)
        try:
            await run_loop(session)
        except Interrupted as interrupted:
            raise Interrupted(
                f"{interrupted}; {session.state.rollout_id} of {session.num_rollout} steps are done and saved in "
                f"{session.folder.path}. Start the same command again to go on."
            ) from None
        if run.config.checkpoint.save_hf:
            await export_hf(session)
        summary = write_summary(session)
    console.sum_up(summary, session.folder)


def listen_for_signals(session: Session) -> None:
    """The first Ctrl-C ends the run at the next clean point; the second one ends it at once."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if session.stop_requested.is_set():
            os._exit(130)
        print("\nstopping after this step; Ctrl-C again ends at once, without saving", file=sys.stderr, flush=True)
        session.stop_requested.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


async def export_hf(session: Session) -> None:
    """hf/: what transformers loads, with the tokenizer beside it. Written aside first."""
    aside = session.folder.path / ".hf.writing"
    aside.mkdir(exist_ok=True)
    await session.trainers.each("save_hf", aside)
    session.tokenizer.save_pretrained(aside)
    if session.folder.hf.exists():
        session.folder.hf.rename(session.folder.path / f".hf.old.{os.getpid()}")
    aside.rename(session.folder.hf)


def print_dry_run(run: BoundRun, materials: Materials) -> None:
    """What would run, as JSON."""
    from slime_core.manifest import build_manifest

    source = materials.source
    manifest = build_manifest(run, data_fingerprint="" if source is None else source.fingerprint())
    print(
        json.dumps(
            {
                "run": run.config.name,
                "steps": materials.num_rollout,
                "optimizer_steps": materials.num_rollout * run.steps_per_rollout,
                "rollouts_per_step": run.rollouts_per_batch,
                "global_batch_size": run.global_batch_size,
                "trainer_ranks": run.num_ranks,
                "engines": run.config.launcher.num_engines,
                "rows": None if source is None else source.num_rows,
                "eval_rows": {name: found.num_rows for name, found in materials.eval_sources.items()},
                "needs": sorted(run.algo.needs),
                "plugins": dict(manifest.plugins),
                "fingerprint": manifest.fingerprint,
            },
            indent=2,
        )
    )
