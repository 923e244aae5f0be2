"""Evaluation: all sets at once, their own metadata, and no group left behind after a failure."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from slime_core.controller.evaluate import EvalTask, Evaluator
from slime_core.errors import RewardError
from slime_core.rollout.groups import RunningGroup
from slime_core.types.prompt import Prompt


@dataclass
class Settings:
    name: str
    metadata_overrides: dict = field(default_factory=dict)
    pass_threshold: float = 1.0


class Runner:
    def __init__(self, make_group, *, rewards=(1.0, 0.0), fail_at=None, hang_after=None):
        self.make_group, self.rewards, self.fail_at, self.hang_after = make_group, rewards, fail_at, hang_after
        self.prompts, self.tasks = [], []

    def start(self, prompt):
        self.prompts.append(prompt)
        task = asyncio.create_task(self._run(prompt))
        self.tasks.append(task)
        group = RunningGroup(prompt=prompt)
        group.task = task
        return group

    async def _run(self, prompt):
        number = prompt.group_index
        # The later, the sooner.
        for _ in range(10 - number):
            await asyncio.sleep(0)
        if number == self.fail_at:
            raise RewardError("no")
        if self.hang_after is not None and number > self.hang_after:
            await asyncio.Event().wait()
        return replace(self.make_group(self.rewards, group_index=number), prompt=prompt)


def prompts(count):
    return [
        Prompt(group_index=n, text="q", token_ids=np.array([1], np.int32), metadata={"row": n, "kind": "data"})
        for n in range(count)
    ]


async def test_all_sets_are_run_and_groups_keep_the_order_of_the_data(make_group):
    one, two = Runner(make_group), Runner(make_group, rewards=(1.0,))
    evaluator = Evaluator(
        [
            EvalTask(settings=Settings("a", {"kind": "set"}), prompts=prompts(3), runner=one),
            EvalTask(settings=Settings("b"), prompts=prompts(2), runner=two),
        ]
    )
    assert len(evaluator) == 2
    report, groups = await evaluator.evaluate(7, 3)
    assert (report.rollout_id, report.version) == (7, 3)
    assert [group.group_index for group in groups["a"]] == [0, 1, 2]
    assert report.metrics["eval/a"] == 0.5
    assert report.metrics["eval/a-pass@1"] == 0.5
    assert report.metrics["eval/a-pass@2"] == 1
    assert report.metrics["eval/b"] == 1
    assert one.prompts[1].metadata == {"row": 1, "kind": "set"}
    assert two.prompts[1].metadata == {"row": 1, "kind": "data"}


async def test_a_failure_ends_the_set_and_cancels_its_requests(make_group):
    runner = Runner(make_group, fail_at=1, hang_after=1)
    evaluator = Evaluator([EvalTask(settings=Settings("a"), prompts=prompts(4), runner=runner)])
    with pytest.raises(RewardError):
        await asyncio.wait_for(evaluator.evaluate(0, 0), 60)
    assert all(task.done() for task in runner.tasks)


async def test_a_failure_ends_the_other_sets_too(make_group):
    failing, other = Runner(make_group, fail_at=1), Runner(make_group, hang_after=0)
    evaluator = Evaluator(
        [
            EvalTask(settings=Settings("a"), prompts=prompts(2), runner=failing),
            EvalTask(settings=Settings("b"), prompts=prompts(3), runner=other),
        ]
    )
    with pytest.raises(RewardError):
        await asyncio.wait_for(evaluator.evaluate(0, 0), 60)
    assert [task.cancelled() for task in other.tasks] == [False, True, True]
