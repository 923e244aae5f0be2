"""Evaluate a model on the run file's evaluation sets."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import typer

from slime_core.cli.commands import TAKES_ANY_WORDS

if TYPE_CHECKING:
    from slime_core.config.bound import BoundRun
    from slime_core.controller.run_inputs import RunInputs

app = typer.Typer()

USAGE: Final = """\
usage: slime eval run.toml [--flag value ...]

Evaluates model.hf_checkpoint on the run file's evaluation sets and prints the metrics as JSON.
--hf-checkpoint FOLDER evaluates another model, such as runs/NAME/hf.
--print-completions-interval 1 prints a few of each set's completions to standard error."""


@app.command(context_settings=TAKES_ANY_WORDS)
def evaluate(context: typer.Context) -> None:
    """Evaluates the run file's model; trains nothing."""
    words = list(context.args)
    if not words or "--help" in words:
        typer.echo(USAGE)
        return
    evaluate_words(words)


def evaluate_words(words: Sequence[str]) -> None:
    """`slime eval` with these words."""
    from slime_core.cli.invocation import bind_invocation, parse_words, warn
    from slime_core.cli.training import run_to_end
    from slime_core.controller.gc_control import gc_paused
    from slime_core.errors import ConfigError

    typed = parse_words(words, switches=("debug",), options=(), command="eval")
    with tempfile.TemporaryDirectory(prefix="slime-eval-") as folder:
        # An evaluation leaves no run folder: it uses a temporary one.
        own = ("--num-rollout", "0", "--runs-dir", folder, "--trackers", "jsonl")
        with gc_paused():
            run = bind_invocation(type(typed)(typed.file, typed.own, (*typed.flags, *own)))
            if not run.evals:
                raise ConfigError(
                    "eval.datasets: no evaluation set; pass --eval-prompt-data NAME PATH, or add one to the run file."
                )
            # These import torch, which takes seconds: a mistake in the run file is reported before.
            from slime_core.controller.run_inputs import load_run_inputs

            inputs = load_run_inputs(run)
        warn(inputs.notices())
        print(json.dumps(run_to_end(evaluate_once(run, inputs)), indent=2))


async def evaluate_once(run: BoundRun, inputs: RunInputs) -> dict[str, float]:
    """The metrics of every set, under the weights in model.hf_checkpoint."""
    from rich.console import Console as RichConsole

    from slime_core.cli.console import print_completions
    from slime_core.controller.start_folder import StartOptions
    from slime_core.controller.startup import start

    async with start(run, inputs, StartOptions(), {}) as session:
        await session.update_weights()
        report, groups = await session.evaluator.evaluate(-1, session.state.version)
    if run.config.debug.print_completions_interval is not None:
        # Standard output has the metrics alone.
        rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        for name, found in groups.items():
            print_completions(rich, f"completions of {name}", found)
    return dict(report.metrics)
