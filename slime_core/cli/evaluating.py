"""What `slime eval` does: bind, start engines and rewards, evaluate, print."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.cli.invocation import bind_invocation, take_apart
from slime_core.config.bound import BoundRun
from slime_core.controller.gc_control import modules_stay
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.controller.run_inputs import Materials


def evaluate_words(words: Sequence[str]) -> None:
    """`slime eval` with these words."""
    typed = take_apart(words, switches=("debug",), options=(), command="eval")
    with tempfile.TemporaryDirectory(prefix="slime-eval-") as folder:
        # Evaluating leaves no run behind: its folder is a temporary one.
        own = ("--num-rollout", "0", "--runs-dir", folder, "--trackers", "jsonl")
        with modules_stay():
            run = bind_invocation(type(typed)(typed.file, typed.own, (*typed.flags, *own)))
            if not run.evals:
                raise ConfigError(
                    "eval.datasets: no evaluation set; say --eval-prompt-data NAME PATH, or add one to the run file."
                )
            # torch comes with these: a mistake in the run file is told before.
            from slime_core.controller.run_inputs import load_materials

            materials = load_materials(run)
        print(json.dumps(asyncio.run(evaluate_once(run, materials)), indent=2))


async def evaluate_once(run: BoundRun, materials: Materials) -> dict[str, float]:
    """The metrics of every set, under the weights in model.hf_checkpoint."""
    from slime_core.controller.startup import StartOptions, start

    async with start(run, materials, StartOptions(), {}) as session:
        await session.publish()
        report, _ = await session.evaluator.evaluate(-1, session.state.version)
    return dict(report.metrics)
