"""What the driver makes of the last message about a group."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_core.errors import RolloutError, SlimeError, StorageError
from slime_core.rollout.groups import RunningGroup, failed_sample
from slime_core.rollout.trace import GroupTrace
from slime_core.types.prompt import Prompt
from slime_rollout_workers.columns import GroupColumns, RewardColumns
from slime_rollout_workers.driver_group import DriverGroup
from slime_rollout_workers.flat import pack_trace
from slime_rollout_workers.messages import Finished, Generated

PROMPT = Prompt(group_index=7, text="1+1=", token_ids=np.array([1, 2, 3], np.int32))
SAMPLES = [failed_sample(PROMPT, index) for index in (14, 15)]
REWARDS = RewardColumns.of(SAMPLES, [replace(sample, reward=1.0) for sample in SAMPLES])
TRACE = pack_trace(GroupTrace(scope="train", group_index=7, reward_s=0.5, responses=[]))


class FullDisk:
    """A runner whose observer writes traces."""

    def on_trace(self, trace: GroupTrace) -> None:
        raise StorageError("traces.jsonl: no space left on device")


def group(runner: Any) -> DriverGroup:
    return DriverGroup(number=0, runner=runner, pickled=b"", running=RunningGroup(prompt=PROMPT))


async def test_a_group_has_the_samples_that_arrived() -> None:
    made = group(None)
    made.take_generated(Generated(0, GroupColumns.of(SAMPLES, PROMPT)))
    made.take_end(Finished(0, REWARDS, None))
    assert [sample.reward for sample in (await made.result).samples] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arrive", "error", "text"),
    [(False, RolloutError, "rewards of 2 samples arrived, and 0"), (True, StorageError, "no space left on device")],
)
async def test_what_the_driver_cannot_take_fails_the_group_alone(
    arrive: bool, error: type[SlimeError], text: str
) -> None:
    made = group(FullDisk())
    if arrive:
        made.take_generated(Generated(0, GroupColumns.of(SAMPLES, PROMPT)))
    made.take_end(Finished(0, REWARDS, TRACE))
    assert made.ended.is_set()
    with pytest.raises(error, match=text):
        await asyncio.wait_for(made.result, 30)
