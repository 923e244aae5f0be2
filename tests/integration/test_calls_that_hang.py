"""Calls that never end: of a trainer rank in this process, and of a middleware. Each run ends in bounded time and names it.
tests/integration/test_ray_launcher.py stops a rank with a process of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

LOSS = '''
"""A loss that never returns while the file `hangs` is there, in the optimizer steps after the second."""
import threading
from pathlib import Path
from slime_core.plugin import loss
from slime_core.contracts.loss import LossOutput

calls = 0


@loss("hangs")
def hangs(inputs, segments):
    global calls
    calls += inputs.log_probs.requires_grad
    if calls > 2 and Path("hangs").exists():
        threading.Event().wait()
    return LossOutput(values=-inputs.advantages * inputs.log_probs)
'''
MIDDLEWARE = '''
"""A middleware that keeps requests: with the file `keeps`, all of step 2; else one, once."""
import asyncio
from pathlib import Path
from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware
from slime_core.plugin import driver

KEPT = Path("kept")


class Keeps(RouterMiddleware):
    async def __call__(self, request, call_next):
        index = int(request.request_id.split("/")[1])
        if Path("keeps").exists() and index >= 8 or index == 5 and not KEPT.exists():
            KEPT.touch()
            await asyncio.Event().wait()
        return await call_next(request)


@driver("slime.middlewares", "keeps")
class KeepsDriver(MiddlewareDriver):
    @classmethod
    def build(cls, config):
        return Keeps()
'''


def test_a_rank_that_hangs_ends_the_run_and_the_same_command_continues(tiny: TinyRun) -> None:
    (tiny / "hanging.py").write_text(LOSS)
    (tiny / "hangs").touch()
    words = ("--plugin", "hanging.py", "--loss", "hangs", "--save-interval", "1")
    ended = tiny.run(*words, "--rank-call-timeout", "15")
    assert ended.code == 6
    assert ended.error == (
        "trainer actor, rank 0 in train (of 1): not ended within 15 s. A rank hangs, or, if its work takes so long, raise "
        f"--rank-call-timeout. To continue from the last checkpoint, {tiny.runs}/tiny/checkpoints/step_2, start the same "
        "command again.\n"
    )
    assert tiny.checkpoints() == ["step_1", "step_2"]
    (tiny / "hangs").unlink()
    ended = tiny.run(*words, "--rank-call-timeout", "100")
    assert (ended.code, ended.err) == (0, "")
    assert tiny.steps() == tiny.steps("train/step") == [0, 1, 2, 3, 4]


def test_a_middleware_that_keeps_requests_is_named_and_they_are_sent_again(tiny: TinyRun) -> None:
    (tiny / "keeping.py").write_text(MIDDLEWARE)
    (tiny / "run.toml").write_text((tiny / "run.toml").read_text() + '[router]\nmiddlewares = ["keeps"]\n')
    words = ("--plugin", "keeping.py", "--middleware-timeout", "1")
    ended = tiny.run(*words, "--num-rollout", "2")
    assert (ended.code, ended.err) == (0, "")
    kept = 'router middleware "keeping.py/keeps", request train/5/0: it has neither passed on nor returned any for 1 s'
    assert f"a response failed: {kept} (--middleware-timeout)" in ended.out.replace("\n", " ")
    assert tiny.steps() == [0, 1]

    (tiny / "keeps").touch()
    ended = tiny.run(*words, "--name", "other", "--num-rollout", "4", "--max-retries", "1")
    assert ended.code == 4
    assert re.search(
        r'middleware "keeping\.py/keeps", request train\.1/\d+/0 and 3 more: it has neither passed', ended.error
    )
    assert tiny.checkpoints("other")[-1] == "step_2"
