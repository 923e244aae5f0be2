"""A rollout step whose end is interrupted; rollouts with equal numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import slime_session.own_loop
from slime_core.errors import RolloutError
from slime_session.own_loop import OwnLoop, require_own_numbers


@contextlib.asynccontextmanager
async def at_once() -> AsyncIterator[None]:
    yield


async def test_optimizer_steps_stay_until_their_report_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they count for no step, and a checkpoint of the step before would be taken for theirs."""
    reports: list[Any] = []
    may_end = asyncio.Event()

    class Learner:
        async def end_step(self, batch: object, trained: object, seconds: float) -> Any:
            await may_end.wait()
            return trained

    async def nothing() -> None:
        return

    monkeypatch.setattr(slime_session.own_loop, "learner_of", lambda session: Learner())
    monkeypatch.setattr(slime_session.own_loop, "joined", tuple)
    loop: Any = object.__new__(OwnLoop)
    loop.session = SimpleNamespace(colocation=SimpleNamespace(train=at_once))
    loop._accumulated, loop._stepped, loop._batch = {}, {"actor": [1, 2]}, object()
    loop._lost, loop._training_s = False, 0.0
    loop._saver = SimpleNamespace(keep_schedule=nothing)
    loop._count = reports.append
    ending = asyncio.create_task(loop.between_steps("update_weights"))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    may_end.set()
    await loop.between_steps("save")
    await loop.between_steps("save")
    assert reports == [[(1, 2)]]


def groups(number: int, *, n_samples: int, first: int = 0) -> Any:
    """Numbered as a run numbers them."""
    return [
        SimpleNamespace(
            samples=[
                SimpleNamespace(rollout_id=group * n_samples + position, group_index=group)
                for position in range(n_samples)
            ]
        )
        for group in range(first, first + number)
    ]


def test_prompts_with_the_same_rollouts_are_refused() -> None:
    """Group 1 has rollouts 4 to 7, and so has group 2 with two samples for each prompt."""
    four, two = groups(4, n_samples=4), groups(2, n_samples=2, first=2)
    require_own_numbers(four)
    require_own_numbers(two)
    with pytest.raises(
        RolloutError, match="groups 1 and 2 both have a rollout 4, because they were sampled with differ"
    ):
        require_own_numbers([*four, *two])
