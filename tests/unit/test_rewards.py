"""Rewards in their worker processes: whatever one does, the run reports it with the prompt."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.config.part import PluginSpec
from slime_core.contracts.reward import ServedModel
from slime_core.errors import PluginError, RewardError, RewardTimeout, RewardUnavailable
from slime_core.registry.plugin_file import PluginFile
from slime_core.rollout import reward_process
from slime_core.rollout.rewards import OwnLimit, RewardPool
from slime_core.rollout.scoring import ScoringPlan, WeightedReward, score_group
from slime_core.types.sample import Status

PLUGIN = """
import os
import time

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.reward import Outcome, Reward, RewardDriver, RewardFailure
from slime_core.errors import RewardUnavailable
from slime_core.plugin import driver, reward


@reward("by_index")
def by_index(sample):
    return 10 * sample.index


@reward("raising")
def raising(sample):
    raise KeyError("missing")


@reward("hanging")
def hanging(sample):
    time.sleep(60)


@reward("asleep")
def asleep(sample):
    time.sleep(600)


@reward("dying")
def dying(sample):
    os._exit(3)


@reward("ending")
def ending(sample):
    raise SystemExit(4)


@reward("pid")
def pid(sample):
    return os.getpid()


@reward("no_plain_value")
def no_plain_value(sample):
    return lambda: 1.0


class Particular(Exception):
    # Is pickled, and cannot be built from that.
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@reward("nan")
def nan(sample):
    return float("nan")


@reward("text")
def text(sample):
    return "1.0"


@reward("nothing")
def nothing(sample):
    return None


@reward("several")
def several(sample):
    return {"score": sample.index, "acc": 0.5}


@reward("too_few")
def too_few(group):
    return [1.0]


@reward("no_list")
def no_list(group):
    return 1.0


@reward("moody")
def moody(sample):
    mood = sample.metadata.get("mood")
    if mood == "raising":
        raise KeyError("missing")
    if mood == "hanging":
        time.sleep(60)
    if mood == "dying":
        os._exit(3)
    return sample.index


class SlowToBuild(RewardDriver):
    @classmethod
    def build(cls, config):
        time.sleep(1.5)
        return Fast()


class Fast(Reward):
    def score(self, group):
        return [1.0 for _ in group.samples]


driver("slime.rewards", "slow_to_build")(SlowToBuild)


class Unbuildable(RewardDriver):
    @classmethod
    def build(cls, config):
        raise ValueError("no model there")


driver("slime.rewards", "unbuildable")(Unbuildable)


class Peculiar(RewardDriver):
    @classmethod
    def build(cls, config):
        raise Particular("no", "file")


driver("slime.rewards", "peculiar")(Peculiar)


class DiesBuilding(RewardDriver):
    @classmethod
    def build(cls, config):
        os._exit(5)


driver("slime.rewards", "dies_building")(DiesBuilding)


class ByPort(Reward):
    # Servers with an odd port fail.

    def __init__(self, servers):
        self.ports = [int(server.url.rpartition(":")[2]) for server in servers]

    def score(self, group):
        if self.ports[0] == 1:
            raise RewardUnavailable("port 1 is gone")
        if self.ports[0] == 3:
            return [RewardFailure(Outcome.TIMEOUT, "port 3 does not respond") for _ in group.samples]
        return [float(self.ports[0]) for _ in group.samples]


@reward("flaky")
def flaky(group):
    FLAKY.append(None)
    return [RewardFailure(Outcome.INFRA, "no service") if len(FLAKY) == 1 else 1.0 for _ in group.samples]


FLAKY = []


class AsksEngines(RewardDriver):
    @classmethod
    def needs_reward_model(cls, config):
        return True

    @classmethod
    def build(cls, config):
        raise AssertionError("it asks engines")

    @classmethod
    def build_with_servers(cls, config, servers):
        return ByPort(servers)


driver("slime.rewards", "asks")(AsksEngines)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("plugin") / "mine.py"
    path.write_text(PLUGIN)
    return (PluginFile.read(path),)


@pytest.fixture(scope="module")
def pool(files):
    made = RewardPool(files, workers=1, timeout_s=60.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unlimited(files):
    """A pool of a run without a time limit: those of the rewards apply."""
    made = RewardPool(files, workers=1)
    yield made
    made.close()


def spec(name):
    return PluginSpec(group="slime.rewards", name=f"mine.py/{name}", options={})


async def score(pool, spec, group, key):
    """By this reward alone, which is to fail for no sample."""
    plan = ScoringPlan(rewards=(WeightedReward(spec=spec, label="it", reward_key=key),))
    return (await score_group(pool, plan, group))[0]


async def error_text(pool, name, group, key=None):
    with pytest.raises(RewardError) as caught:
        await score(pool, spec(name), group, key)
    return str(caught.value)


async def test_every_failure_of_a_reward_is_reported_and_the_next_call_works(unlimited, make_group, monkeypatch):
    """One test, since every process that has to start takes seconds."""
    pool = unlimited
    await pool.warm(spec("by_index"))
    unscored = unscored_group(make_group)
    scored = await score(pool, spec("by_index"), unscored, None)
    assert [sample.reward for sample in scored.samples] == [0, None, 99.0, None, 40]
    assert unscored.samples[0].reward is None

    where = " on train.jsonl:1: "
    raised = await error_text(pool, "raising", unscored)
    assert raised.startswith(f"reward \"mine.py/raising\"{where}raised KeyError: 'missing'")
    assert "--on-reward-failure fail_sample" in raised
    assert (await error_text(pool, "nan", unscored)).endswith(f"{where}returned nan; rewards must be finite.")
    assert (await error_text(pool, "text", unscored)).endswith(f"{where}returned '1.0', which is not a number.")
    assert (await error_text(pool, "nothing", unscored)).endswith(f"{where}returned None, which is not a number.")
    assert (await error_text(pool, "too_few", unscored)).endswith(f"{where}returned 1 values for 2 samples.")
    assert "returned 1.0, not one value for each sample" in await error_text(pool, "no_list", unscored)
    assert "returned ['acc', 'score']; pass one of them as --reward-key." in await error_text(pool, "several", unscored)
    assert """returned no "f1" (--reward-key); there is ['acc', 'score'].""" in await error_text(
        pool, "several", unscored, "f1"
    )
    chosen = await score(pool, spec("several"), unscored, "score")
    assert [sample.reward for sample in chosen.samples] == [0, None, 99.0, None, 4]
    assert chosen.samples[4].reward_parts == {"score": 4.0, "acc": 0.5}
    with pytest.raises(PluginError, match=r'reward "mine.py/unbuildable", build: raised ValueError: no model there'):
        await pool.warm(spec("unbuildable"))
    with pytest.raises(PluginError, match=r'reward "mine.py/peculiar", build: raised Particular: no file'):
        await pool.warm(spec("peculiar"))
    with pytest.raises(RewardError, match=r"dies_building.*its worker process died while it was built \(exit code 5\)"):
        await pool.warm(spec("dies_building"))
    assert "pickle" in await error_text(pool, "no_plain_value", unscored)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_timeout_s", 1.0)
        assert (await error_text(pool, "hanging", unscored)).endswith(
            "no response within 1 s. Raise --reward-timeout, or --on-reward-failure fail_sample to continue without it."
        )
    again = await score(pool, spec("by_index"), unscored, None)
    assert again.samples[4].reward == 40
    assert "its worker process died (exit code 3)." in await error_text(pool, "dying", unscored)
    assert "raised SystemExit: 4 (mine.py:" in await error_text(pool, "ending", unscored)
    again = await score(pool, spec("by_index"), unscored, None)
    assert again.samples[4].reward == 40


async def test_an_idle_worker_that_dies_is_replaced_without_an_error(unlimited, make_group):
    """As the kernel does when memory is short."""
    pool = unlimited
    await pool.warm(spec("pid"))
    workers = []
    for _ in range(2):
        scored = await score(pool, spec("pid"), unscored_group(make_group), None)
        workers.append(int(scored.samples[0].reward))
        os.kill(workers[-1], signal.SIGKILL)
        pool._processes[0]._process.join()
    assert workers[0] != workers[1]


async def test_a_cancelled_call_kills_only_its_worker(files, make_group):
    pool = RewardPool(files, workers=2, timeout_s=600.0)
    try:
        for name in ("pid", "asleep"):
            await pool.warm(spec(name))
        left = asyncio.ensure_future(score(pool, spec("asleep"), unscored_group(make_group), None))
        kept = asyncio.ensure_future(score(pool, spec("asleep"), unscored_group(make_group), None))
        await asyncio.to_thread(both_work, pool)
        left.cancel()
        scored = await asyncio.wait_for(score(pool, spec("pid"), unscored_group(make_group), None), 60)
        assert scored.samples[0].reward > 0
        assert not kept.done()
        kept.cancel()
        await asyncio.gather(left, kept, return_exceptions=True)
    finally:
        pool.close()


async def test_a_call_is_cancelled_also_before_its_worker_begins(files, make_group, monkeypatch):
    """Its thread has taken the process, and has not asked it yet."""
    taken, go, scores = threading.Event(), threading.Event(), reward_process.RewardProcess.score

    def later(*args, **kwargs):
        taken.set()
        go.wait()
        return scores(*args, **kwargs)

    monkeypatch.setattr(reward_process.RewardProcess, "score", later)
    pool = RewardPool(files, workers=1, timeout_s=600.0)
    try:
        await pool.warm(spec("asleep"))
        left = asyncio.ensure_future(score(pool, spec("asleep"), unscored_group(make_group), None))
        await asyncio.to_thread(taken.wait)
        left.cancel()
        await asyncio.wait([left, *pool._parcels])
        go.set()
        scored = await asyncio.wait_for(score(pool, spec("by_index"), unscored_group(make_group), None), 60)
        assert scored.samples[4].reward == 40
    finally:
        go.set()
        pool.close()


async def test_a_worker_that_is_killed_when_it_has_responded_is_not_asked_again(files, make_group, monkeypatch):
    """It may still count as alive."""
    calls, process = reward_process.RewardProcess._call, reward_process.RewardProcess(files)
    group, asked_by = unscored_group(make_group), threading.Event()
    one = spec("by_index").to_json()

    def then_killed(self, function, *args, **options):
        response = calls(self, function, *args, **options)
        if not asked_by.is_set() and function is reward_process.score_groups:
            self.kill(asked_by)
            monkeypatch.setattr(self._process, "is_alive", lambda: True, raising=False)
        return response

    monkeypatch.setattr(reward_process.RewardProcess, "_call", then_killed)
    try:
        for event in (asked_by, threading.Event()):
            process.score(one, None, [group], timeout_s=60, asked_by=event)
    finally:
        process.close()


async def test_a_failing_group_does_not_affect_others(files, make_group, monkeypatch):
    """Groups that are scored together: in one parcel once the reward is known to be fast."""
    pool = RewardPool(files, workers=1, timeout_s=60.0)
    try:
        await pool.warm(spec("moody"))
        await score(pool, spec("moody"), unscored_group(make_group), None)
        monkeypatch.setattr(pool, "_timeout_s", 4.0)
        moods = ["", "raising", "", "hanging", "dying", ""]
        groups = [in_mood(unscored_group(make_group), mood) for mood in moods]
        one_spec = spec("moody")
        scoring = [score(pool, one_spec, group, None) for group in groups]
        results = await asyncio.gather(*scoring, return_exceptions=True)
        kinds = [RewardError, RewardTimeout, RewardUnavailable]
        assert [type(result) for result in results if isinstance(result, Exception)] == kinds
        assert "raised KeyError: 'missing'" in str(results[1])
        assert "in moody" in str(results[1].__cause__)
        assert "no response within 4 s" in str(results[3])
        assert "its worker process died (exit code 3)" in str(results[4])
        for number in (0, 2, 5):
            assert [sample.reward for sample in results[number].samples] == [0, None, 99.0, None, 4]
    finally:
        pool.close()


async def test_a_parcel_of_cancelled_calls_is_cancelled(unlimited, make_group):
    pool = unlimited
    await pool.warm(spec("asleep"), own=OwnLimit(seconds=lambda num_samples: 500.0))
    one_spec = spec("asleep")
    scoring = [asyncio.ensure_future(score(pool, one_spec, unscored_group(make_group), None)) for _ in range(2)]
    await asyncio.sleep(0.1)
    for task in scoring:
        task.cancel()
    began = time.monotonic()
    again = await score(pool, spec("by_index"), unscored_group(make_group), None)
    assert again.samples[4].reward == 40
    # Well before the time limit of the two.
    assert time.monotonic() - began < 120


async def test_a_failure_that_is_returned_is_tried_again_too(unlimited, make_group):
    """A service that does not respond for a moment."""
    await unlimited.warm(spec("flaky"))
    group = unscored_group(make_group)
    verdicts = await unlimited.judge(spec("flaky"), group, None, retries=1)
    assert [verdict.value for verdict in verdicts] == [1.0] * len(group.samples)


async def test_the_time_limit_of_the_run_overrides_that_of_the_reward(pool, unlimited, make_group, monkeypatch):
    own = OwnLimit(seconds=lambda num_samples: 0.2 * num_samples, follows=("tries", "concurrency"))
    for each in (pool, unlimited):
        await each.warm(spec("hanging"), own=own)
    group = unscored_group(make_group)
    # Two of its samples are scored.
    assert (await error_text(unlimited, "hanging", group)).endswith(
        "no response within 0.4 s, the time that the reward's tries, concurrency give 2 samples. Change these, or pass "
        "--reward-timeout, or --on-reward-failure fail_sample to continue without it."
    )
    one = replace(group, samples=tuple(sample for sample in group.samples if sample.index != 4))
    assert "no response within 0.2 s" in await error_text(unlimited, "hanging", one)
    monkeypatch.setattr(pool, "_timeout_s", 1.0)
    assert "no response within 1 s. Raise --reward-timeout" in await error_text(pool, "hanging", group)


async def test_a_worker_that_replaces_another_builds_before_the_clock_runs(unlimited, make_group):
    """Building takes longer than the time limit; else no group could be scored again after one has hung."""
    a_second = OwnLimit(seconds=lambda num_samples: 1.0)
    await unlimited.warm(spec("slow_to_build"), own=a_second)
    await unlimited.warm(spec("hanging"), own=a_second)
    assert "no response" in await error_text(unlimited, "hanging", unscored_group(make_group))
    scored = await score(unlimited, spec("slow_to_build"), unscored_group(make_group), None)
    assert scored.samples[0].reward == 1


async def test_a_worker_that_reads_nothing_is_late(pool, make_group, monkeypatch):
    """Its group is larger than what a pipe takes."""
    await pool.warm(spec("pid"))
    group = unscored_group(make_group)
    scored = await score(pool, spec("pid"), group, None)
    os.kill(int(scored.samples[0].reward), signal.SIGSTOP)
    large = replace(group, samples=tuple(replace(each, response="x" * 2**20) for each in group.samples))
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_timeout_s", 1.0)
        assert "no response within 1 s" in await error_text(pool, "pid", large)
    assert (await score(pool, spec("pid"), group, None)).samples[0].reward != scored.samples[0].reward


async def test_a_reward_that_is_built_again_has_its_time(files, make_group, monkeypatch):
    """Its first build may take as long as it likes."""
    pool = RewardPool(files, workers=1, timeout_s=0.2)
    try:
        await pool.warm(spec("slow_to_build"))
        await pool.warm(spec("hanging"))
        group = unscored_group(make_group)
        assert "no response" in await error_text(pool, "hanging", group)
        monkeypatch.setattr(reward_process, "REBUILD_S", 0.3)
        assert "no response" in await error_text(pool, "slow_to_build", group)
    finally:
        pool.close()


async def test_a_time_limit_that_raises_fails_its_group(unlimited, make_group):
    def none_for_two(num_samples):
        raise KeyError(num_samples)

    await unlimited.warm(spec("by_index"), own=OwnLimit(seconds=none_for_two))
    async with asyncio.timeout(10):
        message = await error_text(unlimited, "by_index", unscored_group(make_group))
    assert message.startswith("mine.py/by_index, timeout_s of 2 samples: raised KeyError: 2")


class Engines:
    """One server at a time; the next one when it was asked in vain, as long as there are any."""

    def __init__(self, *ports):
        self.ports = list(ports)

    async def servers(self):
        return (ServedModel(url=f"http://127.0.0.1:{self.ports[0]}", model_path="/judge"),)

    async def changed(self, asked):
        if len(self.ports) == 1:
            return False
        del self.ports[0]
        return await self.servers() != asked


async def test_a_group_is_scored_again_by_new_servers(files, make_group):
    pool = RewardPool(files, workers=1, timeout_s=20.0)
    pool.engines = Engines(1, 3, 8)
    try:
        await pool.warm(spec("asks"), needs_reward_model=True)
        scored = await score(pool, spec("asks"), unscored_group(make_group), None)
        assert [sample.reward for sample in scored.samples] == [8, None, 99.0, None, 8]
        # Where nothing was lost with its servers, a failure is one.
        pool.engines = Engines(3)
        with pytest.raises(RewardTimeout, match="port 3 does not respond"):
            await score(pool, spec("asks"), unscored_group(make_group), None)
    finally:
        pool.close()


async def test_an_unknown_reward_is_an_error(pool, make_group):
    with pytest.raises((RewardError, PluginError), match="nowhere"):
        await score(pool, spec("nowhere"), unscored_group(make_group), None)


async def test_nothing_to_score_starts_no_worker(make_group):
    pool = RewardPool((), workers=1, timeout_s=1)
    try:
        group = make_group([1.0, None])
        assert await score(pool, spec("by_index"), group, None) is group
    finally:
        pool.close()


def both_work(pool):
    while not all(process._asked_by for process in pool._processes):
        time.sleep(0.01)


def in_mood(group, mood):
    samples = tuple(replace(sample, metadata={"mood": mood}) for sample in group.samples)
    return replace(group, samples=samples)


def unscored_group(make_group):
    """Two to score; an aborted one, a failed one, and one that its generator has scored."""
    from dataclasses import replace

    group = make_group([0.0, 0.0, 99.0, 0.0, 0.0])
    states = [Status.COMPLETED, Status.ABORTED, Status.COMPLETED, Status.FAILED, Status.TRUNCATED]
    samples = [
        replace(sample, reward=sample.reward if sample.reward == 99.0 else None, status=status)
        for sample, status in zip(group.samples, states, strict=True)
    ]
    return replace(group, samples=tuple(samples))
