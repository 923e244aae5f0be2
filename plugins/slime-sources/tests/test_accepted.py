"""The collector with groups that end when the test ends them, and the runner that generates the responses of a group."""

import asyncio
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import slime_sources.accepted as room
from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.metrics import rollout_metrics
from slime_core.config.part import PluginSpec
from slime_core.config.rollout import RolloutConfig
from slime_core.config.run import DataConfig
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.contracts.generator import Generator
from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.errors import EngineError, EngineUnavailable, PluginError, RewardError, RolloutError, RolloutsExhausted
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import GroupRunner, GroupSettings, RunningGroup
from slime_core.rollout.rewards import RewardResult
from slime_core.rollout.scoring import ScoringPlan, WeightedReward
from slime_core.types.buffer_item import ItemKind
from slime_core.types.completion import FinishReason, SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan
from slime_models.new_model import character_tokenizer
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import client_of
from slime_sources.accepted import AcceptedGroups
from slime_sources.pool import GroupPool


def prompt(number):
    return Prompt(group_index=number, text="q", token_ids=np.array([1], np.int32), origin=f"train.jsonl:{number}")


class Numbers:
    """Prompts 0, 1, 2, … up to `end`."""

    metrics = {}

    def __init__(self, end=10**6):
        self.next, self.end = 0, end

    def take(self, num_prompts):
        first, self.next = self.next, min(self.next + num_prompts, self.end)
        return [prompt(number) for number in range(first, self.next)]

    def state(self):
        return {"next": self.next}


def group_of(of_prompt, rewards=(0.0, 1.0), status=Status.COMPLETED):
    return SampleGroup(
        prompt=of_prompt,
        samples=tuple(
            Sample(
                index=of_prompt.group_index * len(rewards) + n,
                group_index=of_prompt.group_index,
                rollout_id=of_prompt.group_index * len(rewards) + n,
                prompt=of_prompt,
                tokens=np.array([1, 2], np.int32),
                prompt_length=1,
                loss_mask=np.ones(1, np.uint8),
                rollout_log_probs=np.zeros(1, np.float32),
                reward=None if status is Status.FAILED else reward,
                status=status,
            )
            for n, reward in enumerate(rewards)
        ),
    )


class ScriptedRunner:
    """Groups end in the order of `order` (numbers not listed: at once, in order of submission) with `outcomes`."""

    def __init__(self, order=(), outcomes=None):
        self.started, self.aborted, self.kept = [], [], {}
        self.order, self.outcomes = list(order), outcomes or {}
        self.ended = defaultdict(asyncio.Event)

    def start(self, of_prompt, kept=()):
        number = of_prompt.group_index
        self.started.append(number)
        self.kept[number] = kept
        group = RunningGroup(prompt=of_prompt)
        group.task = asyncio.create_task(self._run(of_prompt, group.stop))
        return group

    async def _run(self, of_prompt, stop):
        number = of_prompt.group_index
        if number in self.order:
            for earlier in self.order[: self.order.index(number)]:
                await self.ended[earlier].wait()
        outcome = self.outcomes.get(number, (0.0, 1.0))
        if outcome == "never":
            await stop.wait()
            outcome = Status.ABORTED
        self.ended[number].set()
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, Status):
            return group_of(of_prompt, status=outcome)
        return group_of(of_prompt, outcome)

    async def abort(self, groups):
        for group in groups:
            self.aborted.append(group.prompt.group_index)
            group.stop.set()


class NotEqual(GroupFilter):
    """Rewards differ; `gently`: kept after all if too few candidates remain."""

    def __init__(self, gently=False):
        self.gently = gently

    def decide(self, group):
        keep = len(set(group.rewards)) > 1
        return FilterDecision(keep=keep, reason=f"all_{group.rewards[0]:g}", keep_when_insufficient=self.gently)


class Even(GroupFilter):
    def decide(self, group):
        return FilterDecision(keep=group.group_index % 2 == 0, reason="odd")


class Setup:
    def __init__(self, runner, *, filters=(), end=10**6, **config):
        given = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4, **config}
        self.runner = runner
        self.buffer = DataBuffer(Numbers(end), PopFirstFilter())
        self.observed = []
        self.context = RolloutContext(
            config=RolloutConfig(**given),
            data=DataConfig(),
            tokenizer=None,
            buffer=self.buffer,
            runner=runner,
            filters=filters,
            observe=lambda *event: self.observed.append(event),
        )

    async def collect(self, step=0):
        groups = await asyncio.wait_for(AcceptedGroups().collect(step, self.context), 60)
        return [group.group_index for group in groups]

    @property
    def waiting(self):
        return [(item.prompt.group_index, item.kind) for item in self.buffer.items]

    @property
    def refused(self):
        return [(group.group_index, reason) for group, reason in self.observed[-1][2]]


SAME = (1.0, 1.0)


@pytest.mark.parametrize("order", [[], [3, 2, 1, 0], [2, 0, 3, 1]])
async def test_groups_are_accepted_in_the_order_of_submission_whatever_ends_first(order):
    setup = Setup(ScriptedRunner(order, {3: "never"} if not order else {}), over_sampling_batch_size=4)
    assert await setup.collect() == [0, 1]
    assert setup.runner.started == [0, 1, 2, 3]
    # The surplus goes back as prompts, in order, to be the first next time.
    assert setup.waiting == [(2, ItemKind.RETURNED), (3, ItemKind.RETURNED)]
    setup.runner.outcomes.clear()
    assert await setup.collect(1) == [2, 3]


async def test_rejected_groups_are_replaced_once_all_have_ended():
    setup = Setup(ScriptedRunner([1, 0], {0: SAME, 2: SAME}), filters=[NotEqual()])
    assert await setup.collect() == [1, 3]
    assert setup.runner.started == [0, 1, 2, 3]
    assert setup.refused == [(0, "all_1"), (2, "all_1")]
    assert dict(setup.context.counts) == {"rollout/dynamic_filter/drop_all_1": 2}
    assert setup.waiting == []
    step, groups, _ = setup.observed[0]
    assert (step, [group.group_index for group in groups]) == (0, [1, 3])


async def test_waves_keep_the_ratio_of_over_sampling():
    outcomes = dict.fromkeys([0, 1, 2, 3, 4], SAME)
    setup = Setup(ScriptedRunner((), outcomes), filters=[NotEqual()], rollout_batch_size=4, over_sampling_batch_size=6)
    assert await setup.collect() == [5, 6, 7, 8]
    # Six at first; three are missing after one was accepted, which are ceil(3 x 6 / 4) = 5 more.
    assert setup.runner.started == list(range(11))
    assert setup.waiting == [(9, ItemKind.RETURNED), (10, ItemKind.RETURNED)]


async def test_eager_refill_starts_anew_at_once_and_drained_waits():
    for refill, started in (("eager", [0, 1, 2, 3]), ("drained", [0, 1, 2])):
        # 1 and 2 wait for 99, which never starts.
        runner = ScriptedRunner([0, 99, 1, 2], {0: SAME})
        setup = Setup(runner, filters=[NotEqual()], refill=refill, rollout_batch_size=3)
        collecting = asyncio.create_task(setup.collect())
        for _ in range(50):
            await asyncio.sleep(0)
        seen = list(runner.started)
        assert setup.context.counts["rollout/dynamic_filter/drop_all_1"] == 1
        runner.ended[99].set()
        assert await collecting == [1, 2, 3]
        assert seen == started, refill


async def test_exhausted_data_does_not_end_a_step_with_enough_groups_in_flight():
    runner = ScriptedRunner((), {0: SAME})
    setup = Setup(runner, filters=[NotEqual()], end=4, refill="eager", rollout_batch_size=2, over_sampling_batch_size=4)
    assert await setup.collect() == [1, 2]
    short = Setup(
        ScriptedRunner((), dict.fromkeys([0, 1, 2], SAME)), filters=[NotEqual()], end=4, refill="eager",
        rollout_batch_size=2, over_sampling_batch_size=4,
    )  # fmt: skip
    with pytest.raises(RolloutsExhausted, match="1 of the 2 groups that a step requires are left"):
        await short.collect()


async def test_filters_run_in_order_and_the_first_that_drops_counts():
    setup = Setup(ScriptedRunner((), {1: SAME}), filters=[Even(), NotEqual()])
    assert await setup.collect() == [0, 2]
    assert setup.refused == [(1, "odd")]
    setup = Setup(ScriptedRunner((), {1: SAME}), filters=[NotEqual(), Even()])
    assert await setup.collect() == [0, 2]
    assert setup.refused == [(1, "all_1")]


class Untrained(GroupFilter):
    """Keeps every group, without its samples of this reward."""

    def __init__(self, reward):
        self.reward = reward

    def decide(self, group):
        chosen = [n for n, sample in enumerate(group.samples) if sample.reward == self.reward]
        return FilterDecision(keep=True, masked_indices=tuple(chosen))


async def test_samples_that_filters_mask_are_marked_only_in_accepted_groups():
    runner = ScriptedRunner((), {0: (0.0, 1.0, 2.0), 1: SAME, 2: (0.0, 0.5, 0.5)})
    setup = Setup(runner, filters=[Untrained(1.0), NotEqual(), Untrained(2.0)])
    assert await setup.collect() == [0, 2]
    _, groups, refused = setup.observed[0]
    assert [[sample.remove_sample for sample in group.samples] for group in groups] == [
        [False, True, True],
        [False] * 3,
    ]
    # Rewards stay, for the statistics of the group; a rejected group is reported unchanged.
    assert groups[0].rewards == [0.0, 1.0, 2.0]
    assert not any(sample.remove_sample for sample in refused[0][0].samples)
    counts = {"rollout/dynamic_filter/drop_all_1": 1, "rollout/dynamic_filter/untrained_samples": 2}
    assert dict(setup.context.counts) == counts


async def test_a_preference_yields_when_too_few_candidates_remain():
    # Two of three are requested: the first may go, the second would leave too few.
    outcomes = dict.fromkeys([0, 1, 2], SAME)
    setup = Setup(ScriptedRunner((), outcomes), filters=[NotEqual(gently=True)], over_sampling_batch_size=3)
    assert await setup.collect() == [1, 2]
    assert setup.refused == [(0, "all_1")]


async def test_a_preference_that_yields_does_not_overrule_the_next_filter():
    setup = Setup(ScriptedRunner((), {1: SAME}), filters=[NotEqual(gently=True), Even()])
    assert await setup.collect() == [0, 2]
    assert setup.refused == [(1, "odd")]


async def test_too_many_rejections_end_the_step_with_the_reasons():
    outcomes = dict.fromkeys(range(100), SAME) | {3: (0.0, 0.0)}
    setup = Setup(ScriptedRunner((), outcomes), filters=[NotEqual()], max_filtered_groups=5)
    with pytest.raises(
        RolloutError,
        match=r"step 7: 5 groups were rejected while 0 of 2 were accepted \(all_1 4, all_0 1\).*--max-filtered-groups",
    ):
        await setup.collect(7)
    # By default ten times the batch.
    setup = Setup(ScriptedRunner((), outcomes), filters=[NotEqual()])
    with pytest.raises(RolloutError, match="20 groups were rejected"):
        await setup.collect()


async def test_the_most_frequent_failure_is_reported_instead_of_the_limit():
    def failing(errors):
        class Failing(Responses):
            async def generate(self, episode):
                raise errors[episode.prompt.group_index % len(errors)]

        return runner(Failing(), retries=0)[0]

    errors = [
        EngineUnavailable("lost 4 times"),
        ValueError("row 1: responded 500 oops"),
        ValueError("row 2: responded 500 oops"),
    ]
    expected = (
        r"step 0: 3 groups were rejected while 0 of 2 were accepted \(failed 3\)\. Of 9 failed responses 6 failed so: "
        r"ValueError: row 1: responded 500 oops \(test_accepted.py:\d+ in generate\) "
        r"\(events.jsonl in the run's folder has all of them\)\. "
        r"Fix the failing generator or reward\.$"
    )
    for on_exhausted in ("error", "finish"):
        setup = Setup(failing(errors), max_filtered_groups=3, on_exhausted=on_exhausted)
        with pytest.raises(RolloutError, match=expected) as raised:
            await setup.collect()
        # The data may still have groups to learn from.
        assert not isinstance(raised.value, RolloutsExhausted)

    # If every response fails with the same error, as many groups as the step requires are enough, unless a limit is set.
    for limit, rejected in ((None, 2), (5, 5)):
        with pytest.raises(RolloutError, match=rf"{rejected} groups were rejected while 0 of 2 were accepted \(failed"):
            await Setup(failing(errors[1:]), max_filtered_groups=limit).collect()
    with pytest.raises(RolloutError, match="20 groups were rejected while 0 of 2 were accepted"):
        await Setup(failing([ValueError("one"), KeyError("another")])).collect()

    # The same for rewards; where filters reject most groups, the message names filters.
    made, _ = runner(Responses(), rewards=Rewards(RewardError("responded 500 oops")), tolerant=True)
    with pytest.raises(RolloutError, match="Of 6 failed responses 6 failed so: responded 500 oops"):
        await Setup(made, max_filtered_groups=2).collect()
    outcomes = {0: Status.FAILED, 1: SAME, 2: SAME}
    setup = Setup(ScriptedRunner((), outcomes), filters=[NotEqual()], max_filtered_groups=3, rollout_batch_size=3)
    with pytest.raises(
        RolloutsExhausted, match=r"\(all_1 2, failed 1\)\. Check the filters .*: --on-exhausted finish\.$"
    ):
        await setup.collect()


async def test_failed_groups_are_requeued_or_dropped():
    for way, waiting in (("requeue", [(0, ItemKind.RETURNED)]), ("drop", [])):
        setup = Setup(ScriptedRunner((), {0: Status.FAILED}), on_failed_group=way)
        assert await setup.collect() == [1, 2]
        assert setup.refused == [(0, "failed")]
        assert setup.context.counts["rollout/failed_groups"] == 1
        assert setup.waiting == waiting


async def test_a_group_that_an_engine_aborted_is_rejected_and_requeued():
    setup = Setup(ScriptedRunner((), {1: Status.ABORTED}))
    assert await setup.collect() == [0, 2]
    assert setup.waiting == [(1, ItemKind.RETURNED)]


async def test_running_groups_are_aborted_and_counted():
    setup = Setup(ScriptedRunner((), {2: "never", 3: SAME}), over_sampling_batch_size=4)
    assert await setup.collect() == [0, 1]
    assert 2 in setup.runner.aborted
    assert setup.context.counts == {"rollout/aborted_groups": 1, "rollout/surplus_groups": 1}


async def test_an_abort_that_missed_is_repeated(monkeypatch):
    monkeypatch.setattr(room, "ABORT_INTERVAL_S", 0.01)

    class Deaf(ScriptedRunner):
        async def abort(self, groups):
            self.aborted += [group.prompt.group_index for group in groups]
            if len(self.aborted) == 3:
                await super().abort(groups)

    setup = Setup(Deaf((), {2: "never"}), over_sampling_batch_size=3)
    assert await setup.collect() == [0, 1]
    assert setup.runner.aborted == [2, 2, 2, 2]


@pytest.mark.parametrize("error", [RewardError("reward"), EngineError("engine")])
async def test_an_error_ends_the_step_and_loses_no_prompt(error):
    setup = Setup(ScriptedRunner((), {1: error, 2: "never"}), rollout_batch_size=3)
    with pytest.raises(type(error)):
        await setup.collect()
    assert [number for number, _ in setup.waiting] == [1, 2]
    assert setup.observed == []


class Lost(ScriptedRunner):
    """Its engine is lost: an abort fails like the request."""

    async def abort(self, groups):
        raise EngineError("the abort failed")

    def start(self, of_prompt, kept=()):
        group = super().start(of_prompt, kept)
        self.tasks = [*getattr(self, "tasks", []), group.task]
        return group


@pytest.mark.parametrize(
    ("collector", "config"),
    [(AcceptedGroups, {}), (GroupPool, {"partial_rollout": True, "over_sampling_batch_size": 3})],
)
async def test_an_abort_that_fails_hides_no_error_and_loses_no_prompt(collector, config):
    setup = Setup(
        Lost((), {0: EngineError("engine 0 is lost"), 1: "never", 2: "never"}), rollout_batch_size=3, **config
    )
    with pytest.raises(EngineError, match="engine 0 is lost") as raised:
        await asyncio.wait_for(collector().collect(0, setup.context), 60)
    (note,) = raised.value.__notes__
    assert note.endswith("the abort failed")
    assert sorted(number for number, _ in setup.waiting) == [0, 1, 2]
    assert all(task.done() for task in setup.runner.tasks)


async def test_an_abort_that_fails_after_a_step_is_the_error():
    setup = Setup(Lost((), {2: "never"}), over_sampling_batch_size=3)
    with pytest.raises(EngineError, match="the abort failed"):
        await setup.collect()
    assert [number for number, _ in setup.waiting] == [2]
    assert all(task.done() for task in setup.runner.tasks)


async def test_what_is_aborted_may_clean_up_for_longer_than_an_abort_takes(monkeypatch):
    monkeypatch.setattr(room, "ABORT_INTERVAL_S", 0.01)
    cleaned = []

    class Tidy(ScriptedRunner):
        async def _run(self, of_prompt, stop):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)
                cleaned.append(of_prompt.group_index)

    setup = Setup(Tidy())
    collecting = asyncio.create_task(AcceptedGroups().collect(0, setup.context))
    await asyncio.sleep(0.05)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(collecting, 60)
    assert cleaned == [0, 1]


async def test_cancelling_the_step_ends_what_runs():
    runner = ScriptedRunner((), {0: "never", 1: "never"})
    setup = Setup(runner)
    collecting = asyncio.create_task(AcceptedGroups().collect(0, setup.context))
    for _ in range(20):
        await asyncio.sleep(0)
    assert runner.started == [0, 1]
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(collecting, 60)
    assert [number for number, _ in setup.waiting] == [0, 1]


async def test_a_step_reports_exhausted_data():
    setup = Setup(ScriptedRunner(), end=3)
    assert await setup.collect() == [0, 1]
    with pytest.raises(RolloutError, match=r"step 1: the data has ended: 1 of the 2 groups .*: --on-exhausted finish"):
        await setup.collect(1)
    setup = Setup(ScriptedRunner(), end=2, on_exhausted="finish")
    assert await setup.collect() == [0, 1]
    with pytest.raises(RolloutError, match=r"there is no prompt left.* divides the number of prompts\.$"):
        await setup.collect(1)


# --- The runner -------------------------------------------------------------------------------------------------------


class Responses(Generator):
    """Fails `failures[index]` times; otherwise returns one sample, or the result of `samples` for it."""

    def __init__(self, failures=None, samples=None):
        self.failures, self.samples = dict(failures or {}), samples
        self.asked = []

    async def generate(self, episode):
        index = episode.trajectory().index
        self.asked.append((index, episode.trajectory().response_length))
        if self.failures.get(index, 0):
            self.failures[index] -= 1
            raise ValueError("tool broke")
        sample = replace(group_of(episode.prompt).samples[0], index=index, rollout_id=index, reward=None)
        return [sample] if self.samples is None else self.samples(sample)


class Rewards:
    def __init__(self, error=None):
        self.error = error

    async def judge(self, spec, group, key, *, retries=0):
        assert spec is BY_INDEX
        return [RewardResult(value=float(s.index), failure=self.error) for s in group.samples]


BY_INDEX = PluginSpec(group="slime.rewards", name="by_index", options={})


def runner(generator, *, rewards=None, retries=3, tolerant=False):
    failures = []
    made = GroupRunner(
        GroupSettings(
            scope="train",
            num_samples=3,
            sampling=SamplingParams(max_new_tokens=4),
            seed=1,
            max_context_len=None,
            scoring=ScoringPlan(
                rewards=(WeightedReward(spec=BY_INDEX, label="by_index"),),
                policies={"wrong": "fail_sample" if tolerant else "error"},
            ),
            evaluation=False,
            max_retries=retries,
        ),
        generator=generator,
        client=None,
        tokenizer=None,
        rewards=rewards or Rewards(),
        on_failure=failures.append,
    )
    return made, failures


async def test_responses_are_numbered_through_the_run():
    made, _ = runner(Responses())
    group = await made.start(prompt(5)).task
    assert [sample.index for sample in group.samples] == [15, 16, 17]
    assert group.rewards == [15, 16, 17]


async def test_a_tools_output_beyond_the_budget_is_not_in_the_group():
    def with_output(sample):
        sampled = sample.response_length
        return [
            replace(
                sample,
                tokens=np.append(sample.tokens, np.full(900, 7, np.int32)),
                loss_mask=np.append(sample.loss_mask, np.zeros(900, np.uint8)),
                rollout_log_probs=np.append(sample.rollout_log_probs, np.zeros(900, np.float32)),
                spans=(VersionSpan(0, 0, sampled),),
                status=Status.TRUNCATED,
            )
        ]

    made, _ = runner(Responses(samples=with_output))
    made.tokenizer = character_tokenizer("abcdefgh")
    group = await made.start(prompt(0)).task
    batch = build_batch([group])
    assert batch.response_length.tolist() == [sample.num_trainable for sample in group.samples]
    assert rollout_metrics(batch, 0)["rollout/response_len/max"] == batch.response_length.max()
    assert batch.truncated.all()


class Impatient(Responses):
    """Leaves a request behind."""

    left = ()

    async def generate(self, episode):
        self.left = (*self.left, asyncio.create_task(episode.complete(episode.prompt.token_ids)))
        await asyncio.sleep(0)
        return await super().generate(episode)


@pytest.mark.parametrize("failures", [{}, {1: 1}])
async def test_requests_that_a_generator_leaves_behind_are_aborted(failures):
    generator = Impatient(failures)
    made, _ = runner(generator)
    made.client = client_of(ScriptedEngine(held=True))
    group = await made.start(prompt(0)).task
    assert len(group.samples) == 3
    ended, running = await asyncio.wait(generator.left, timeout=10)
    assert not running
    assert {task.result().finish_reason for task in ended} == {FinishReason.ABORT}
    assert len(generator.left) == 3 + len(failures)


async def test_a_failed_response_is_tried_again_and_then_given_up():
    made, failures = runner(Responses({1: 2}))
    group = await made.start(prompt(0)).task
    assert [sample.status for sample in group.samples] == [Status.COMPLETED] * 3
    assert [(f.index, f.attempt, f.will_retry) for f in failures] == [(1, 1, True), (1, 2, True)]
    made, failures = runner(Responses({1: 9}), retries=1)
    group = await made.start(prompt(0)).task
    assert [sample.status for sample in group.samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group.samples[1].response_length == 0
    assert group.samples[1].remove_sample
    assert [f.will_retry for f in failures] == [True, False]


async def test_a_request_that_was_lost_too_often_fails_its_sample():
    """The client has used all its retries; the generator is not retried."""

    class Poisonous(Responses):
        async def generate(self, episode):
            if episode.trajectory().index == 2:
                raise EngineUnavailable("lost 4 times")
            return await super().generate(episode)

    made, failures = runner(Poisonous())
    group = await made.start(prompt(0)).task
    assert [sample.status for sample in group.samples] == [Status.COMPLETED, Status.COMPLETED, Status.FAILED]
    assert [(f.index, f.attempt, f.will_retry) for f in failures] == [(2, 1, False)]


async def test_a_generator_cancelled_by_something_else_than_the_run_has_failed():
    """Not the run, which would be none of its failures."""

    class Cancelled(Responses):
        async def generate(self, episode):
            if episode.trajectory().index == 1:
                tool = asyncio.create_task(asyncio.sleep(9))
                tool.cancel()
                await tool
            return await super().generate(episode)

    made, failures = runner(Cancelled(), retries=1)
    group = await made.start(prompt(0)).task
    assert [sample.status for sample in group.samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert [(f.index, f.attempt, f.will_retry) for f in failures] == [(1, 1, True), (1, 2, False)]
    assert "generator Cancelled, generate on train.jsonl:0: what it awaited was cancelled" in str(failures[0].error)


@pytest.mark.parametrize("cause", ["cancelled", "failure"])
async def test_cancelled_responses_are_cancelled_once_and_end_with_their_group(cause):
    cleaned = []

    class Cleaning(Responses):
        async def generate(self, episode):
            index = episode.trajectory().index
            try:
                if index == 2 and cause == "failure":
                    await asyncio.sleep(0)
                    raise EngineError("gone")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                # The first has ended when the second is in the middle.
                for _ in range(1 + 9 * index):
                    await asyncio.sleep(0)
                cleaned.append(index)
                raise

    made, failures = runner(Cleaning())
    task = made.start(prompt(0)).task
    for _ in range(5):
        await asyncio.sleep(0)
    if cause == "cancelled":
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cause == "cancelled" else EngineError):
        await task
    assert cleaned == ([0, 1, 2] if cause == "cancelled" else [0, 1])
    assert failures == []


async def test_a_generator_can_request_rewards():
    class Sharing(Responses):
        async def generate(self, episode):
            (sample,) = await episode.score(await super().generate(episode))
            return [replace(sample, reward=sample.reward + 0.5)]

    made, _ = runner(Sharing())
    # Existing rewards are kept.
    assert (await made.start(prompt(5)).task).rewards == [15.5, 16.5, 17.5]
    made, failures = runner(Sharing(), rewards=Rewards(RewardError("no")))
    with pytest.raises(RewardError):
        await made.start(prompt(5)).task
    assert failures == []


async def test_an_engine_error_is_not_tried_again():
    class Dead(Generator):
        async def generate(self, episode):
            raise EngineError("dead")

    made, failures = runner(Dead())
    with pytest.raises(EngineError):
        await made.start(prompt(0)).task
    assert failures == []


def wrong_mask(sample):
    return [replace(sample, loss_mask=np.ones(3, np.uint8))]


def unsaveable(sample):
    return [replace(sample, metadata={"score": np.float32(1)})]


def wrong_span(sample):
    return [replace(sample, spans=((0, 0, 5),))]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (lambda sample: [], "returned no sample"),
        (wrong_mask, r"sample 0 has 1 response tokens, but \{'loss_mask': 3\}"),
        (wrong_span, r"spans \[\(0, 0, 5\)\] with 1 response tokens"),
        (unsaveable, r"sample 0: metadata\['score'\] is of type float32, which JSON cannot hold"),
    ],
)
async def test_invalid_samples_stop_the_run(samples, message):
    made, _ = runner(Responses(samples=samples))
    with pytest.raises(PluginError, match=f"generator Responses:? ?.*{message}"):
        await made.start(prompt(0)).task


async def test_a_failing_reward_stops_the_run_or_fails_the_samples():
    made, _ = runner(Responses(), rewards=Rewards(RewardError("no")))
    with pytest.raises(RewardError):
        await made.start(prompt(0)).task
    made, failures = runner(Responses(), rewards=Rewards(RewardError("no")), tolerant=True)
    group = await made.start(prompt(0)).task
    assert {sample.status for sample in group.samples} == {Status.FAILED}
    assert all(sample.remove_sample and sample.reward is None for sample in group.samples)
    assert [failure.index for failure in failures] == [0, 1, 2]


async def test_kept_samples_are_not_generated_again():
    """Finished responses are taken as they are, all the samples of one; unfinished ones continue."""
    of_prompt = prompt(0)
    first = group_of(of_prompt, (1.0,)).samples[0]
    kept = (
        replace(first, index=0, rollout_id=0),
        replace(first, index=0, rollout_id=0, reward=2.0),
        replace(first, index=1, rollout_id=1, status=Status.ABORTED),
    )
    generator = Responses()
    made, _ = runner(generator)
    group = await made.start(of_prompt, kept).task
    assert generator.asked == [(1, 1), (2, 0)]
    assert [sample.index for sample in group.samples] == [0, 0, 1, 2]
