"""Lost engines and their requests, on a clock that does not wait."""

import asyncio
import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.engine import EngineInfo, MemoryTag
from slime_core.contracts.hookspecs import Run, hookimpl
from slime_core.controller.health import health_monitors
from slime_core.controller.session import Session
from slime_core.errors import EngineError, EngineRefused, EngineUnavailable, TrainingError
from slime_core.registry.hooks import Hooks
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_health_monitor import EngineHealthMonitor, HealthRules
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_core.types.report import WeightUpdateReport
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.devices import Devices
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.faulty_engine import FaultyEngine

RUN = Run(name="r", run_dir=Path("/runs/r"), config={})
RULES = HealthRules(interval_s=10, timeout_s=4, first_wait_s=0, max_restarts=3, window_s=1000)
VERSION = 3
START_S = 20.0


def now():
    return asyncio.get_running_loop().time()


class Observer:
    """Records events with their times."""

    def __init__(self):
        self.events = []

    def _note(self, name, event):
        self.events.append((name, event.engine_index, now(), event))

    @hookimpl
    def engine_lost(self, event):
        self._note("lost", event)

    @hookimpl
    def engine_restarted(self, event):
        self._note("restarted", event)

    @hookimpl
    def engine_recovered(self, event):
        self._note("recovered", event)

    def times(self, name):
        return [time for what, _, time, _ in self.events if what == name]

    @property
    def names(self):
        return [(what, index) for what, index, _, _ in self.events]

    def only(self, name):
        (event,) = [event for what, _, _, event in self.events if what == name]
        return event


@dataclass
class Ward:
    """Engines with a monitor. Replacements come from `spare`, else they are healthy."""

    engines: list[FaultyEngine]
    rules: HealthRules = RULES
    spare: list[FaultyEngine | Exception] = field(default_factory=list)
    max_losses: int = 3
    concurrency: int = 64
    counts: Counter = field(default_factory=Counter)
    observer: Observer = field(default_factory=Observer)
    trainers_free: asyncio.Event = field(default_factory=asyncio.Event)
    sent_version: int = VERSION
    ended: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self):
        self.seated = list(self.engines)
        self.trainers_free.set()
        self.client = EngineClient(
            self.engines, concurrency=self.concurrency, max_losses=self.max_losses, call_limit_s=100
        )

    @contextlib.asynccontextmanager
    async def open(self, **settings):
        monitor = EngineHealthMonitor(
            self.client,
            self.rules,
            end=self.end,
            restart=self.restart,
            update_engine_weights=self.update_engine_weights,
            hooks=Hooks({"test/observer": self.observer}),
            run=RUN,
            rollout_id=lambda: 5,
            counts=self.counts,
            **settings,
        )
        async with monitor:
            yield self

    async def end(self, index):
        self.ended.append((now(), index))

    async def restart(self, index):
        await asyncio.sleep(START_S)
        engine = self.spare.pop(0) if self.spare else FaultyEngine()
        if isinstance(engine, Exception):
            raise engine
        self.seated[index] = engine
        self.engines.append(engine)
        return engine, EngineInfo(capabilities=frozenset(), pid=1000 + len(self.engines))

    async def update_engine_weights(self, engine, admit):
        await self.trainers_free.wait()
        assert engine.num_engines == 1
        await engine.call_all("resume")
        engine.engine.scripted._version = self.sent_version
        await admit(VERSION)

    def start(self, *names):
        return {name: asyncio.create_task(self.client.generate(request(name))) for name in names}

    def responses(self):
        """Number of engines that responded, by request."""
        return Counter(done.request_id for engine in self.engines for done in engine.scripted.completions)


def request(name):
    return GenerateRequest(
        request_id=name,
        token_ids=np.array([5, 6], np.int32),
        sampling=SamplingParams(max_new_tokens=9),
        seed=sum(name.encode()),
    )


async def require_scripted(tasks):
    """Each response is what any engine would have given."""
    for name, task in tasks.items():
        completion = await task
        assert completion.request_id == name
        expected, reason = FaultyEngine().scripted.script(request(name))
        assert completion.token_ids.tolist() == expected.tolist()
        assert completion.finish_reason is reason


def test_an_engine_that_dies_loses_nothing():
    async def scene():
        async with Ward([FaultyEngine(delay_s=1) for _ in range(3)]).open() as ward:
            tasks = ward.start(*"abcdefghi")
            await asyncio.sleep(0.5)
            ward.engines[1].die()
            await require_scripted(tasks)
            # At once, by the others, and together; in the order in which they came.
            assert now() == pytest.approx(1.5)
            assert ward.engines[1].asked == [["b", "e", "h"]]
            assert ward.ended == [(0.5, 1)]
            assert sorted(name for e in (0, 2) for name in ward.engines[e].asked[1]) == ["b", "e", "h"]
            assert ward.responses() == Counter("abcdefghi")
            await asyncio.sleep(100)
            assert ward.observer.names == [("lost", 1), ("restarted", 1), ("recovered", 1)]
            assert (ward.observer.only("lost").redispatched, ward.observer.only("lost").rollout_id) == (3, 5)
            assert ward.observer.only("restarted").pid == 1004
            assert ward.observer.only("restarted").seconds == START_S
            recovered = ward.observer.only("recovered")
            assert (recovered.version, recovered.seconds) == (VERSION, START_S)
            assert ward.counts == {"rollout/redispatched": 3, "rollout/engine_restarts": 1}
            assert ward.client.indices == (0, 1, 2)

    run_fast(scene())


def test_without_any_engine_requests_wait_for_one():
    async def scene():
        async with Ward([FaultyEngine(delay_s=1)]).open() as ward:
            tasks = ward.start(*"ab")
            await asyncio.sleep(0.5)
            ward.engines[0].die()
            await asyncio.sleep(5)
            tasks |= ward.start("c")
            await require_scripted(tasks)
            assert now() == pytest.approx(0.5 + START_S)
            # What was lost goes first; a new engine gets one request until it has given a response.
            assert [name for message in ward.engines[1].asked for name in message] == ["a", "b", "c"]
            assert ward.engines[1].asked[0] == ["a"]

    run_fast(scene())


def test_an_engine_that_hangs_fails_its_health_check():
    async def scene():
        rules = HealthRules(interval_s=10, timeout_s=4, first_wait_s=3)
        async with Ward([FaultyEngine(delay_s=15), FaultyEngine(delay_s=15)], rules=rules).open() as ward:
            tasks = ward.start(*"ab")
            await asyncio.sleep(14)
            assert [engine.calls for engine in ward.engines] == [["health"], ["health"]]
            ward.engines[0].hang()
            await require_scripted(tasks)
            # First wait 3, asked at 13 and at 23, no response by 27; the other one takes 15 for what is asked again.
            (lost_at,) = ward.observer.times("lost")
            assert lost_at == pytest.approx(27)
            assert now() == pytest.approx(42)
            assert "engine 0 did not respond to the health check within 4 s" in str(ward.observer.only("lost").error)

    run_fast(scene())


def test_a_late_response_of_a_lost_engine_is_ignored():
    async def scene():
        async with Ward([FaultyEngine(delay_s=5), FaultyEngine(delay_s=1)]).open() as ward:
            tasks = ward.start("a")
            await asyncio.sleep(4)
            ward.client.quarantine(0, EngineError("for a test"))
            await require_scripted(tasks)
            assert now() == pytest.approx(5)
            await asyncio.sleep(50)
            assert ward.responses() == Counter("a")

    run_fast(scene())


def test_a_lost_engine_that_ignores_cancellation_is_ignored():
    class Stubborn(FaultyEngine):
        async def generate(self, requests):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(50)
            async for completion in super().generate(requests):
                yield completion

    async def scene():
        async with Ward([Stubborn(), FaultyEngine(delay_s=1)], concurrency=2).open() as ward:
            tasks = ward.start("a")
            await asyncio.sleep(1)
            ward.client.quarantine(0, EngineError("for a test"))
            await require_scripted(tasks)
            assert ward.responses() == {"a": 2}
            # Its response was not counted: the engine in its place has as much room as any.
            await asyncio.sleep(START_S)
            await require_scripted(ward.start(*"bcdefg"))
            assert max(len(message) for engine in ward.engines for message in engine.asked) == 2

    run_fast(scene())


def test_a_recovered_engine_is_checked_too():
    async def scene():
        async with Ward([FaultyEngine(), FaultyEngine()]).open() as ward:
            ward.client.quarantine(0, EngineError("for a test"))
            await asyncio.sleep(START_S + 1)
            ward.seated[0].hang()
            await asyncio.sleep(14)
            assert ward.observer.names[3:] == [("lost", 0)]

    run_fast(scene())


def test_an_engine_with_slow_health_checks_stays():
    class Slow(FaultyEngine):
        async def call(self, method, *args):
            await asyncio.sleep(3.9)
            return await super().call(method, *args)

    async def scene():
        async with Ward([Slow()]).open() as ward:
            await asyncio.sleep(200)
            assert ward.observer.events == []

    run_fast(scene())


@pytest.mark.parametrize("seconds", [6, 3600])
def test_a_check_does_not_count_when_this_process_was_blocked(seconds):
    class Outage(FaultyEngine):
        async def call(self, method, *args):
            # As if this process had been stopped just then, or held by a checkpoint.
            asyncio.get_running_loop().now += seconds
            await asyncio.sleep(0.01)
            return await super().call(method, *args)

    async def scene():
        async with Ward([Outage()]).open() as ward:
            await asyncio.sleep(3700)
            assert ward.observer.events == []

    run_fast(scene())


@pytest.mark.parametrize("held", [("pause", "resume"), ("sleep", "wake_up")])
def test_paused_and_sleeping_engines_are_not_checked(held):
    async def scene():
        async with Ward([FaultyEngine()]).open() as ward:
            await ward.client.call_all(held[0])
            await asyncio.sleep(95)
            assert ward.engines[0].calls == [held[0]]
            await ward.client.call_all(held[1])
            await asyncio.sleep(10)
            assert ward.engines[0].calls == [*held, "health"]

    run_fast(scene())


def test_a_lost_engine_is_started_when_the_others_are_awake():
    async def scene():
        async with Ward([FaultyEngine(), FaultyEngine()]).open() as ward:
            ward.client.quarantine(0, EngineError("for a test"))
            await ward.client.call_all("sleep")
            await asyncio.sleep(500)
            assert ward.observer.names == [("lost", 0)]
            await ward.client.call_all("wake_up")
            await asyncio.sleep(START_S / 2)
            # Asleep again before it is there: it is put to sleep too.
            await ward.client.call_all("sleep")
            await asyncio.sleep(START_S)
            assert ward.observer.names == [("lost", 0), ("restarted", 0), ("recovered", 0)]
            assert ward.seated[0].calls[-1] == "sleep"

    run_fast(scene())


def test_an_engine_that_fails_repeatedly_ends_the_run():
    async def scene():
        ill = [FaultyEngine(fails_in="health") for _ in range(3)]
        rules = HealthRules(interval_s=10, timeout_s=4, max_restarts=3, window_s=1000, pause_s=1)
        async with Ward([FaultyEngine(delay_s=1)], rules=rules, spare=ill).open() as ward:
            tasks = ward.start(*"ab")
            await asyncio.sleep(0.5)
            ward.engines[0].die()
            for task in tasks.values():
                with pytest.raises(EngineError) as raised:
                    await task
                text = str(raised.value)
                assert "engine 0 was lost again after 3 restarts within 1000 s" in text
                assert "--max-engine-restarts 3" in text
                assert "the engine is gone" in text
            # Three starts, and 1 and 2 seconds before the second and the third.
            assert now() == pytest.approx(0.5 + 3 * START_S + 1 + 2)
            for late in (ward.client.generate(request("c")), ward.client.call_all("resume")):
                with pytest.raises(EngineError, match="max-engine-restarts"):
                    await late

    run_fast(scene())


def test_restarts_are_forgotten_after_a_while():
    async def scene():
        rules = HealthRules(interval_s=1e6, max_restarts=1, window_s=100)
        async with Ward([FaultyEngine()], rules=rules).open() as ward:
            for _ in range(5):
                await require_scripted(ward.start("a"))
                ward.seated[0].die()
                await require_scripted(ward.start("a"))
                await asyncio.sleep(101)
            assert len(ward.observer.times("recovered")) == 5
            ward.seated[0].die()
            await require_scripted(ward.start("a"))
            ward.seated[0].die()
            with pytest.raises(EngineError, match="after 1 restarts within 100 s"):
                await ward.client.generate(request("a"))

    run_fast(scene())


def test_a_start_that_fails_is_tried_again():
    async def scene():
        spare = [EngineError("no room"), OSError("no memory")]
        async with Ward([FaultyEngine()], spare=spare).open() as ward:
            ward.engines[0].die()
            await require_scripted(ward.start("a"))
            assert now() == pytest.approx(3 * START_S + 1 + 2)
            assert ward.observer.names == [("lost", 0), ("restarted", 0), ("recovered", 0)]
            # At once each time: what was started in vain may hold memory.
            assert ward.ended == [(0, 0), (START_S, 0), (2 * START_S + 1, 0)]

    run_fast(scene())


def test_an_engine_that_cannot_be_ended_is_tried_again_and_then_ends_the_run():
    class Clinging(Ward):
        async def end(self, index):
            await super().end(index)
            self.ending.set()
            if len(self.ended) < self.works_at:
                raise OSError("the machine does not respond")

    async def scene(works_at):
        ward = Clinging([FaultyEngine()])
        ward.works_at, ward.ending = works_at, asyncio.Event()
        devices = Devices(offload=True)
        colocation = ColocationManager(devices, ward.client, shared=True, offload_rollout=True)
        begun = asyncio.Event()

        async def train():
            async with colocation.train():
                begun.set()

        async with ward.open(leaves=colocation.leaves):
            ward.engines[0].die()
            tasks = ward.start("a")
            await ward.ending.wait()
            training = asyncio.create_task(train())
            if works_at > 3:
                # The trainers would not fit beside an engine that may still hold its memory.
                with pytest.raises(EngineError, match=r"^engine 0 could not be ended: the machine does not respond$"):
                    await training
                assert not begun.is_set()
                # But what was trained is saved.
                await train()
            else:
                await training
            assert len(ward.ended) == min(works_at, 4)
            await colocation.rollout()
            await require_scripted(tasks)

    run_fast(scene(2))
    with pytest.raises(EngineError, match="engine 0 could not be ended: the machine does not respond"):
        run_fast(scene(9))


def test_a_start_that_hangs_times_out():
    async def scene():
        rules = HealthRules(start_limit_s=START_S / 2, max_restarts=2)
        async with Ward([FaultyEngine()], rules=rules).open() as ward:
            ward.engines[0].die()
            with pytest.raises(EngineError, match="could not be started again: not within 10 s"):
                await ward.client.generate(request("a"))

    run_fast(scene())


def test_an_engine_with_other_weights_is_not_admitted():
    async def scene():
        async with Ward([FaultyEngine()], sent_version=VERSION - 1).open() as ward:
            ward.engines[0].die()
            with pytest.raises(EngineError, match="got weights of version 3 but has version 2"):
                await ward.client.generate(request("a"))
            assert [engine.asked for engine in ward.engines[1:]] == [[]] * 3

    run_fast(scene())


def test_weights_are_sent_when_the_trainers_are_free():
    async def scene():
        async with Ward([FaultyEngine()]).open() as ward:
            ward.trainers_free.clear()
            ward.engines[0].die()
            tasks = ward.start("a")
            await asyncio.sleep(1000)
            assert ward.observer.names == [("lost", 0), ("restarted", 0)]
            ward.trainers_free.set()
            await require_scripted(tasks)

    run_fast(scene())


def test_trainers_that_fail_end_the_run():
    async def scene():
        ward = Ward([FaultyEngine()])

        async def update_engine_weights(engine, admit):
            raise TrainingError("rank 1 is gone")

        ward.update_engine_weights = update_engine_weights
        async with ward.open():
            ward.engines[0].die()
            with pytest.raises(TrainingError, match="rank 1 is gone"):
                await ward.client.generate(request("a"))

    run_fast(scene())


def test_a_request_that_kills_engines_fails():
    async def scene():
        spare = [FaultyEngine(poison="p", delay_s=1) for _ in range(2)]
        ward = Ward([FaultyEngine(poison="p", delay_s=1)], spare=spare, max_losses=2)
        async with ward.open():
            tasks = ward.start(*"apz")
            with pytest.raises(
                EngineUnavailable, match=r"p was lost 3 times .*--max-retries 2.*engine 0: the engine is"
            ):
                await tasks.pop("p")
            # A new engine gets one at a time: what waits beside it is not blamed.
            await require_scripted(tasks)

    run_fast(scene())


def test_a_refusal_does_not_quarantine_the_engine():
    class Refusing(FaultyEngine):
        async def generate(self, requests):
            if any(one.request_id == "bad" for one in requests):
                raise EngineRefused("token 99 is not in the vocabulary")
            async for completion in super().generate(requests):
                yield completion

        async def call(self, method, *args):
            if method == "load_bucket":
                raise EngineRefused("another model")
            return await super().call(method, *args)

    async def scene():
        async with Ward([Refusing()]).open() as ward:
            with pytest.raises(EngineRefused, match="not in the vocabulary"):
                await ward.client.generate(request("bad"))
            with pytest.raises(EngineRefused, match="another model"):
                await ward.client.call_all("load_bucket", None)
            await require_scripted(ward.start("a"))
            assert ward.observer.events == []

    run_fast(scene())


def test_calls_skip_lost_engines():
    async def scene():
        engines = [FaultyEngine(), FaultyEngine(fails_in="pause"), FaultyEngine()]
        async with Ward(engines).open() as ward:
            assert await ward.client.call_all("version") == [7, 7, 7]
            assert await ward.client.call_all("pause") == [None, None]
            assert ward.client.indices == (0, 2)
            assert ward.client.num_engines == 2
            engines[2].hang()
            assert await ward.client.call_all("version") == [7]
            assert now() == pytest.approx(100)
            assert [index for _, index in ward.observer.names].count(2) == 1
            assert "has not ended version within 100 s" in str(ward.observer.events[-1][3].error)

    run_fast(scene())


def test_a_call_does_not_wait_for_an_engine_that_is_lost_meanwhile():
    async def scene():
        engines = [FaultyEngine(), FaultyEngine()]
        async with Ward(engines).open() as ward:
            engines[0].hang()
            # A probe at 10 gets no response by 14.
            assert await ward.client.call_all("version") == [7]
            assert now() == pytest.approx(14)

    run_fast(scene())


def test_a_response_to_another_request_quarantines_the_engine():
    class Confused(FaultyEngine):
        async def generate(self, requests):
            async for completion in super().generate([request("other"), *requests]):
                yield completion

    async def scene():
        async with Ward([Confused(), FaultyEngine()]).open() as ward:
            await require_scripted(ward.start("a"))
            assert "responded to other, which it did not get" in str(ward.observer.only("lost").error)

    run_fast(scene())


def test_an_abort_reaches_requests_of_lost_engines():
    async def scene():
        async with Ward([FaultyEngine(delay_s=1)]).open() as ward:
            tasks = ward.start("a")
            await asyncio.sleep(0.5)
            ward.engines[0].die()
            await asyncio.sleep(0.1)
            await ward.client.abort(["a"])
            assert (await tasks["a"]).finish_reason == "abort"
            assert now() == pytest.approx(0.6)

    run_fast(scene())


def test_an_observer_that_fails_ends_the_run():
    async def scene():
        class Broken(Observer):
            @hookimpl
            def engine_lost(self, event):
                raise KeyError("oh")

        async with Ward([FaultyEngine()], observer=Broken()).open() as ward:
            ward.engines[0].die()
            with pytest.raises(Exception, match=r"observer .test/observer., engine_lost: raised KeyError"):
                await ward.client.generate(request("a"))

    run_fast(scene())


def test_no_task_is_left():
    async def scene():
        before = asyncio.all_tasks()
        async with Ward([FaultyEngine(), FaultyEngine()]).open() as ward:
            ward.client.quarantine(0, EngineError("for a test"))
            await asyncio.sleep(1)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        # Without a watcher a failure is raised to the caller.
        ward.engines[1].die()
        with pytest.raises(EngineError, match="the engine is gone"):
            await ward.client.generate(request("a"))

    run_fast(scene())


# ---------------------------------------------------------------- the session's part


class TrainGroup:
    """A role whose devices are given to one at a time."""

    def __init__(self):
        self._turns = asyncio.Lock()

    def turn(self):
        return self._turns


class Transport:
    def __init__(self, session):
        self.session, self.pushed, self.failures = session, [], []

    async def push(self, trainers, engines, version):
        await asyncio.sleep(1)
        self.pushed.append((now(), version, engines.num_engines))
        if self.failures:
            raise self.failures.pop(0)


def a_session():
    session = SimpleNamespace(
        optimizer_idle=asyncio.Event(),
        weight_update_lock=asyncio.Lock(),
        policy=TrainGroup(),
        state=SimpleNamespace(version=4),
        client=None,
        run=SimpleNamespace(weights_follow=False),
    )
    session.optimizer_idle.set()
    session.transport = Transport(session)
    devices = SimpleNamespace(offload=False, turn=lambda policy, weights_only: policy.turn())
    session.colocation = ColocationManager(devices, None, shared=False, offload_rollout=False)
    return session


class Link:
    """One engine, not in service yet."""

    num_engines = 1

    def __init__(self):
        self.calls = []

    async def call_all(self, method):
        self.calls.append((method, now()))


class Admitted:
    def __init__(self):
        self.at = []

    async def __call__(self, version):
        self.at.append((now(), version))


def test_idle_trainers_send_the_weights_at_once():
    async def scene():
        session, admitted = a_session(), Admitted()
        link = Link()
        await Session.update_engine_weights(session, link, admitted)
        assert session.transport.pushed == [(1, 4, 1)]
        assert link.calls == [("pause", 0), ("resume", 1)]
        assert admitted.at == [(1, 4)]

    run_fast(scene())


def test_trainers_within_a_step_send_the_weights_after_it():
    """The step has let go of its devices for a moment when the engine is ready; its weights are no version then."""

    async def scene():
        session, admitted = a_session(), Admitted()

        async def step():
            async with session.policy.turn():
                await asyncio.sleep(5)
            await asyncio.sleep(2)
            session.state.version = 5
            session.optimizer_idle.set()

        update_engine_weights = asyncio.create_task(Session.update_engine_weights(session, Link(), admitted))
        async with session.weight_update_lock:
            # The engine waits for a weight update; meanwhile a step begins.
            await asyncio.sleep(1)
            session.optimizer_idle.clear()
            training = asyncio.create_task(step())
            await asyncio.sleep(1)
        await update_engine_weights
        await training
        assert session.transport.pushed == [(9, 5, 1)]
        assert admitted.at == [(9, 5)]

    run_fast(scene())


def test_a_weight_update_waits_until_the_engine_is_admitted():
    async def scene():
        session = a_session()
        order = []

        async def admit(version):
            await asyncio.sleep(3)
            order.append("admitted")

        update_engine_weights = asyncio.create_task(Session.update_engine_weights(session, Link(), admit))
        await asyncio.sleep(0)
        async with session.weight_update_lock:
            order.append("published")
        await update_engine_weights
        assert order == ["admitted", "published"]

    run_fast(scene())


class ColocatedTrainer:
    """A role that records whether it is awake."""

    def __init__(self):
        self.awake = True

    async def call_all(self, method, *args):
        self.awake = method == "wake_up" or bool(args and args[0])
        return []


async def a_colocated_session(client, *, offload_rollout):
    """Trainer and engines share devices, as in ROLLOUT."""
    session = a_session()
    session.policy, devices = ColocatedTrainer(), Devices(offload=True)
    await devices.settle(session.policy)
    session.colocation = ColocationManager(devices, client, shared=True, offload_rollout=offload_rollout)
    session.client, session.devices = client, devices
    return session


class Newcomer(Link):
    """Takes its time for everything."""

    async def call_all(self, method, *args):
        await asyncio.sleep(1)
        self.calls.append(method)
        return []


@pytest.mark.parametrize("offload_rollout", [False, True])
@pytest.mark.parametrize("failures", [[], [EngineError("it hangs")]])
def test_engines_continue_after_one_beside_them_got_its_weights(offload_rollout, failures):
    async def scene():
        async with Ward([FaultyEngine()]).open() as ward:
            session = await a_colocated_session(ward.client, offload_rollout=offload_rollout)
            session.transport.failures = list(failures)
            admitted = Admitted()
            with pytest.raises(EngineError, match="it hangs") if failures else contextlib.nullcontext():
                await Session.update_engine_weights(session, Newcomer(), admitted)
            assert len(admitted.at) == (not failures)
            assert not ward.client.quiesce
            assert not session.policy.awake
            calls = [call for call in ward.engines[0].calls if call != "health"]
            assert calls == (["pause", "sleep", "wake_up", "resume"] if offload_rollout else [])

    run_fast(scene())


class DroppingEngine(FaultyEngine):
    """Has no weights after it slept, until it gets new ones, and does not resume without."""

    dropped = False

    async def call(self, method, *args):
        if method == "sleep" and MemoryTag.WEIGHTS in args[0]:
            self.dropped = True
        if method == "resume" and self.dropped:
            raise EngineError("its weights were dropped")
        return await super().call(method, *args)


@pytest.mark.parametrize("failures", [[], [EngineError("it hangs")]])
@pytest.mark.parametrize("begins", ["before", "within", "after"])
def test_engines_that_dropped_their_weights_are_not_woken_for_one_that_is_started_again(begins, failures):
    """Whenever it is ready beside a step's training: their weight update comes first, and it may fail alone."""

    async def scene():
        async with Ward([DroppingEngine()]).open() as ward:
            session = await a_colocated_session(ward.client, offload_rollout=True)
            session.run, session.hooks, session.event = SimpleNamespace(weights_follow=True), Hooks({}), RUN

            async def push(transport, client):
                ward.engines[0].dropped = False
                return WeightUpdateReport(version=4, seconds=0.0, bytes_sent=0, buckets=0)

            session._push = push
            session.times = session.colocation.times
            session.transport.failures = list(failures)
            admitted, newcomer = Admitted(), Newcomer()

            async def joins():
                with pytest.raises(EngineError, match="it hangs") if failures else contextlib.nullcontext():
                    await Session.update_engine_weights(session, newcomer, admitted)

            async def room():
                async with session.colocation.starting():
                    await asyncio.sleep(1)

            joining = []
            if begins == "before":
                joining.append(asyncio.create_task(joins()))
                await asyncio.sleep(0.5)
            async with session.colocation.train():
                if begins == "within":
                    joining += [asyncio.create_task(room()), asyncio.create_task(joins())]
                    await asyncio.sleep(1)
            if begins == "after":
                await room()
                joining.append(asyncio.create_task(joins()))
            await asyncio.sleep(2)
            await Session.update_weights(session)
            await asyncio.gather(*joining)
            assert ward.client.indices == (0,)
            assert len(admitted.at) == (not failures)
            assert [calls for calls in ward.engines[0].calls if calls != "health"][-1] == "resume"
            assert not ward.client.quiesce

    run_fast(scene())


class MemoryEngine(FaultyEngine):
    """Holds all its memory from its start on, and takes its time for everything."""

    def __init__(self):
        super().__init__()
        self.held = set(MemoryTag)

    async def call(self, method, *args):
        await asyncio.sleep(0.3)
        result = await super().call(method, *args)
        if method == "sleep":
            self.held -= set(*args or (MemoryTag,))
        elif method == "wake_up":
            self.held |= set(*args or (MemoryTag,))
        return result


class Site:
    """A launcher of one colocated run, and the run's session. Its engine 0 is lost."""

    def __init__(self, client, session, *, starts_in_vain):
        self.engines = {index: client.engine(index) for index in client.indices}
        self.starting = False
        self.session = session
        self.starts_in_vain = starts_in_vain

    async def end_engine(self, index):
        await asyncio.sleep(4)
        self.engines[index].held.clear()

    async def restart_engine(self, index):
        assert not self.engines[index].held
        self.starting = True
        self.engines[index] = MemoryEngine()
        await asyncio.sleep(START_S)
        self.starting = False
        if self.starts_in_vain:
            self.starts_in_vain -= 1
            raise EngineError("it does not respond")
        return self.engines[index], EngineInfo(capabilities=frozenset(), pid=1)

    async def push(self, trainers, engines, version):
        await asyncio.sleep(3)
        assert engines.engine.held == {MemoryTag.WEIGHTS}
        engines.engine.scripted._version = version

    def require_room(self):
        assert not self.starting
        assert [engine.held for engine in self.engines.values()] == [set(), set()]

    async def step(self):
        session = self.session
        session.optimizer_idle.clear()
        async with session.colocation.train(), session.devices.turn(session.policy):
            self.require_room()
            await asyncio.sleep(50)
            self.require_room()
        session.state.version += 1
        session.optimizer_idle.set()
        await session.colocation.rollout()


@pytest.mark.parametrize("starts_in_vain", [0, 1])
@pytest.mark.parametrize("updates_weights", [False, True])
def test_no_engine_holds_memory_while_the_trainer_trains(updates_weights, starts_in_vain):
    """Whenever a step begins while an engine that hangs is replaced, perhaps by one that does not come."""

    rollout = RolloutConfig(rollout_batch_size=1, rollout_max_response_len=1)

    async def scene(begins):
        client = EngineClient([MemoryEngine(), MemoryEngine()], concurrency=4)
        session = await a_colocated_session(client, offload_rollout=True)
        session.transport = site = Site(client, session, starts_in_vain=starts_in_vain)
        session.served_engines, session.faults, session.hooks, session.event = (), Counter(), Hooks({}), RUN
        session.run = SimpleNamespace(config=SimpleNamespace(rollout=rollout), weights_follow=False)
        session.state.rollout_id = 0
        session.update_engine_weights = functools.partial(Session.update_engine_weights, session)
        (monitor,) = health_monitors(session, site)
        async with monitor:
            client.quarantine(0, EngineError("it hangs"))
            await asyncio.sleep(begins)
            async with session.weight_update_lock if updates_weights else contextlib.nullcontext():
                await site.step()
            await asyncio.sleep(200)
            assert client.indices == (0, 1)
            assert not client.quiesce
            assert [engine.held for engine in site.engines.values()] == [set(MemoryTag)] * 2
            assert not session.policy.awake

    for tenths in range(0, 300 + 240 * starts_in_vain, 4 + 5 * starts_in_vain):
        run_fast(scene(tenths / 10))


def test_a_weight_update_is_repeated_for_the_remaining_engines():
    async def scene():
        engines = [FaultyEngine(), FaultyEngine()]
        async with Ward(engines).open() as ward:
            session = a_session()
            session.transport.failures = [EngineError("a collective broke off")]
            engines[0].die()
            await Session._push(session, session.transport, ward.client)
            # The transport saw it first; asked, one engine is found dead, and the other one is sent everything again.
            assert session.transport.pushed == [(1, 4, 2), (2, 4, 1)]

    run_fast(scene())


def test_an_engine_that_did_not_receive_the_weights_is_replaced():
    async def scene():
        engines = [FaultyEngine(), FaultyEngine(), FaultyEngine()]
        async with Ward(engines).open() as ward:
            session = a_session()
            # If no engine has them, the engines are not the cause: the error is raised.
            session.transport.failures = [EngineError("the trainer exported nothing")]
            with pytest.raises(EngineError, match="the trainer exported nothing"):
                await Session._push(session, session.transport, ward.client)
            for engine in (engines[0], engines[2]):
                engine.scripted._version = 4
            session.transport.failures = [EngineError("engine 1 has 7")]
            await Session._push(session, session.transport, ward.client)
            assert [count for _, _, count in session.transport.pushed] == [3, 3, 2]
            assert ward.client.indices == (0, 2)
            await asyncio.sleep(START_S + 1)
            assert ward.observer.names == [("lost", 1), ("restarted", 1), ("recovered", 1)]

    run_fast(scene())
