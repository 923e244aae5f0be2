"""What trainers and engines hold on shared devices in each phase: the calls that they get, in order."""

import asyncio
import gc

import pytest

import slime_core.workers.colocation
from slime_core.contracts.engine import MemoryTag
from slime_core.errors import EngineError
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.devices import Devices


class Device:
    """What trainer and engine hold; the whole of both does not fit."""

    def __init__(self):
        self.log = []
        self.trainer = {"weights", "others"}
        self.engine = set(MemoryTag)
        self.paused = False

    def note(self, line):
        self.log.append(line)
        both = len(self.trainer) + len(self.engine)
        assert both <= 3, f"{line}: trainer {self.trainer} and engine {self.engine} hold too much at once"


class Trainer:
    def __init__(self, device):
        self.device = device

    async def call_all(self, method, *args):
        await asyncio.sleep(0)
        part = bool(args and args[0])
        if method == "sleep":
            self.device.trainer &= {"weights"} if part else set()
        elif method == "free_cache":
            self.device.trainer.discard("cached")
        else:
            self.device.trainer |= {"weights"} if part else {"weights", "others"}
        self.device.note(f"trainer {method}{' weights' if part else ''}")


class Engines:
    num_engines = 1

    def __init__(self, device):
        self.device = device

    async def call_all(self, method, *args):
        await asyncio.sleep(0)
        if method == "sleep":
            assert self.device.paused
            self.device.engine -= set(args[0])
        elif method == "wake_up":
            self.device.engine |= set(args[0])
        else:
            self.device.paused = method == "pause"
        self.device.note(" ".join(["engine", method, *(tag.value for tag in (args[0] if args else ()))]))
        return []


async def colocated(device, **more):
    devices = Devices(offload=more.pop("offload_train", True))
    trainer, engines = Trainer(device), Engines(device)
    await devices.settle(trainer)
    settings = {"shared": True, "offload_rollout": True} | more
    return ColocationManager(devices, engines, **settings), devices, trainer, engines


async def update_weights(colocation, trainer, engines, device):
    await engines.call_all("pause")
    async with colocation.sync(trainer):
        assert device.trainer == {"weights"}
        assert device.engine == {MemoryTag.WEIGHTS}
        device.log.append("push")
    await colocation.rollout()
    assert device.trainer == set()
    assert device.engine == set(MemoryTag)
    assert not device.paused


async def step(colocation, devices, trainer, device):
    await colocation.rollout()
    device.log.append("generate")
    async with colocation.train(), devices.turn(trainer):
        assert device.trainer == {"weights", "others"}
        assert device.engine == set()
        device.log.append("train")
    async with colocation.train(), devices.turn(trainer):
        device.log.append("save")


async def test_a_colocated_run():
    """generate, engine offloads, trainer onloads, train, save, trainer keeps its weights, engine onloads its weights, weight
    update, trainer offloads, engine onloads the rest."""
    device = Device()
    device.trainer = {"weights"}
    colocation, devices, trainer, engines = await colocated(device)
    device.log.clear()
    await update_weights(colocation, trainer, engines, device)
    assert device.log == [
        "engine pause", "engine pause", "engine sleep kv_cache cuda_graph", "trainer wake_up weights", "push",
        "trainer sleep", "engine wake_up kv_cache cuda_graph", "engine resume",
    ]  # fmt: skip
    device.log.clear()
    await step(colocation, devices, trainer, device)
    await update_weights(colocation, trainer, engines, device)
    assert device.log == [
        "generate", "engine pause", "engine sleep weights kv_cache cuda_graph", "trainer wake_up", "train", "save",
        "engine pause", "trainer sleep weights", "engine wake_up weights", "push",
        "trainer sleep", "engine wake_up kv_cache cuda_graph", "engine resume",
    ]  # fmt: skip
    # A step without a weight update: the engines' weights come back from the host.
    await step(colocation, devices, trainer, device)
    device.log.clear()
    await colocation.rollout()
    assert device.log == ["trainer sleep", "engine wake_up weights kv_cache cuda_graph", "engine resume"]


async def test_offload_and_onload_times_are_reported_once():
    device = Device()
    device.trainer = {"weights"}
    colocation, devices, trainer, engines = await colocated(device)
    assert colocation.times.lap().parts.keys() == {"sleep", "other"}, "settling"
    await update_weights(colocation, trainer, engines, device)
    await step(colocation, devices, trainer, device)
    lap = colocation.times.lap()
    assert lap.parts.keys() == {"sleep", "wake_up", "engine_sleep", "engine_wake_up", "other"}
    assert all(seconds > 0 for seconds in lap.parts.values())
    assert sum(lap.parts.values()) == pytest.approx(lap.seconds)
    assert colocation.times.lap().parts.keys() == {"other"}


@pytest.mark.parametrize(("offload_train", "offload_rollout"), [(True, False), (False, True), (False, False)])
async def test_either_side_may_stay(offload_train, offload_rollout, monkeypatch):
    device = Device()
    monkeypatch.setattr(device, "note", device.log.append)
    colocation, devices, trainer, engines = await colocated(
        device, offload_train=offload_train, offload_rollout=offload_rollout
    )
    device.log.clear()
    async with colocation.train(), devices.turn(trainer):
        pass
    await engines.call_all("pause")
    async with colocation.sync(trainer):
        pass
    await colocation.rollout()
    moved = {line.split()[0] for line in device.log if "sleep" in line or "wake" in line}
    assert ("trainer free_cache" in device.log) is (offload_rollout and not offload_train)
    assert moved == {name for name, on in (("trainer", offload_train), ("engine", offload_rollout)) if on}


async def test_a_trainer_that_stays_frees_what_it_cached_before_engines_onload(monkeypatch):
    """Beside its state there is room for the engines, but not for the activations of the last step, or for what was gathered
    for a weight update, which the allocator keeps."""
    device = Device()
    device.trainer = {"state"}
    monkeypatch.setattr(device, "note", device.log.append)
    colocation, devices, trainer, engines = await colocated(device, offload_train=False)
    critic, call_all = Trainer(device), engines.call_all

    async def has_room(method, *args):
        assert method != "wake_up" or device.trainer == {"state"}, (method, args)
        return await call_all(method, *args)

    monkeypatch.setattr(engines, "call_all", has_room)
    device.log.clear()
    for role in (trainer, critic, trainer):
        async with colocation.train(), devices.turn(role):
            device.trainer.add("cached")
    await engines.call_all("pause")
    async with colocation.sync(trainer):
        device.trainer.add("cached")
        device.log.append("push")
    await colocation.rollout()
    assert [line for line in device.log if line != "engine pause"] == [
        "engine sleep weights kv_cache cuda_graph", "trainer free_cache", "trainer free_cache", "engine wake_up weights",
        "push", "trainer free_cache", "engine wake_up kv_cache cuda_graph", "engine resume",
    ]  # fmt: skip
    device.log.clear()
    # An engine that is started in the place of another one gets a freed device too.
    async with colocation.starting():
        assert device.log == [], "nothing was used since"
    async with colocation.train(), devices.turn(trainer):
        device.trainer.add("cached")
    async with colocation.starting():
        assert device.trainer == {"state"}
    assert colocation.times.lap().parts.keys() == {"sleep", "engine_sleep", "engine_wake_up", "other"}


async def test_phases_exclude_each_other_only_where_memory_is_given_back():
    device = Device()
    device.trainer = {"weights"}
    colocation, devices, trainer, engines = await colocated(device)
    await engines.call_all("pause")

    async def train():
        async with colocation.train(), devices.turn(trainer):
            before = list(device.log)
            await asyncio.sleep(0.01)
            assert device.log == before, "another phase has begun"

    await asyncio.gather(train(), colocation.rollout(), train())
    apart = ColocationManager(Devices(), engines, shared=False, offload_rollout=False)
    async with apart.train():
        await asyncio.wait_for(apart.rollout(), 1)
        async with apart.sync(trainer):
            pass


async def test_a_restarted_engine_is_offloaded_like_the_others():
    device, other = Device(), Device()
    device.trainer = {"weights"}
    colocation, devices, trainer, _ = await colocated(device)
    async with colocation.train(), devices.turn(trainer):
        pass
    newcomer = Engines(other)
    other.trainer = set()
    await newcomer.call_all("pause")
    async with colocation.sync(trainer, joining=newcomer):
        assert other.engine == device.engine == {MemoryTag.WEIGHTS}
    await colocation.rollout(joining=newcomer)
    assert other.engine == device.engine == set(MemoryTag)


async def test_engines_whose_wake_was_interrupted_are_put_to_sleep(monkeypatch):
    """Interrupted by Ctrl-C: the trained step is saved next, and needs the devices."""
    device = Device()
    colocation, devices, trainer, engines = await colocated(device)
    async with colocation.train(), devices.turn(trainer):
        pass
    each, asked = engines.call_all, asyncio.Event()

    async def later(method, *args):
        await asyncio.sleep(0.02)
        return await each(method, *args)

    async def wakes_all_the_same(method, *args):
        """Whether its caller waits or not; until then it is asleep, and sleep does nothing."""
        waking = asyncio.ensure_future(later(method, *args))
        asked.set()
        await asyncio.shield(waking)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "call_all", wakes_all_the_same)
        waking = asyncio.create_task(colocation.rollout())
        await asked.wait()
        waking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waking
    async with colocation.train(), devices.turn(trainer):
        await asyncio.sleep(0.05)
        assert device.engine == set()


async def interrupted(change, engines, monkeypatch, until):
    """Cancels the change when engines are about to do `until`, which they do all the same."""
    each, asked = engines.call_all, asyncio.Event()

    async def slowly(method, *args):
        if method == until:
            asked.set()
            await asyncio.sleep(0.02)
        return await each(method, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "call_all", lambda *call: asyncio.shield(asyncio.ensure_future(slowly(*call))))
        changing = asyncio.create_task(change)
        await asked.wait()
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing


@pytest.mark.parametrize("until", ["pause", "sleep"])
async def test_engines_whose_sleep_was_interrupted_wake_up(monkeypatch, until):
    device = Device()
    device.trainer = set()
    colocation, _, _, engines = await colocated(device)

    async def train():
        async with colocation.train():
            raise AssertionError("interrupted before")

    await interrupted(train(), engines, monkeypatch, until)
    await colocation.rollout()
    await asyncio.sleep(0.05)
    assert (device.engine, device.paused) == (set(MemoryTag), False)


@pytest.mark.parametrize("until", ["wake_up", "resume"])
async def test_engines_whose_wake_was_interrupted_are_resumed(monkeypatch, until):
    device = Device()
    colocation, devices, trainer, engines = await colocated(device)
    async with colocation.train(), devices.turn(trainer):
        pass
    await interrupted(colocation.rollout(), engines, monkeypatch, until)
    await colocation.rollout()
    await asyncio.sleep(0.05)
    assert (device.engine, device.paused) == (set(MemoryTag), False)


async def test_a_change_that_was_given_up_makes_no_further_call(monkeypatch):
    """It would mix with the calls of the next phase."""
    monkeypatch.setattr(slime_core.workers.colocation, "WAKE_S", 0.01)
    device = Device()
    device.trainer = set()
    colocation, _, _, engines = await colocated(device)
    asked = []

    async def slowly(method, *args):
        asked.append(method)
        await asyncio.sleep(30)

    monkeypatch.setattr(engines, "call_all", slowly)
    train = asyncio.create_task(colocation.train().__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked == ["pause"]
    train.cancel()
    with pytest.raises(asyncio.CancelledError):
        await train
    await asyncio.sleep(0.3)
    assert asked == ["pause"]


async def test_an_interrupted_change_that_fails_leaves_no_unread_error(monkeypatch):
    device = Device()
    device.trainer = set()
    colocation, _, _, engines = await colocated(device)
    unread = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))

    async def fails(method, *args):
        await asyncio.sleep(0.01)
        raise EngineError("the server has ended")

    monkeypatch.setattr(engines, "call_all", fails)
    train = asyncio.create_task(colocation.train().__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    train.cancel()
    with pytest.raises(asyncio.CancelledError):
        await train
    del train
    gc.collect()
    await asyncio.sleep(0)
    assert not unread


async def test_an_engine_that_never_wakes_up_is_waited_for_a_while(monkeypatch):
    monkeypatch.setattr(slime_core.workers.colocation, "WAKE_S", 0.01)
    colocation, devices, trainer, engines = await colocated(Device())
    async with colocation.train(), devices.turn(trainer):
        pass
    monkeypatch.setattr(engines, "call_all", lambda method, *args: asyncio.Event().wait())
    waking = asyncio.create_task(colocation.rollout())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waking, 60)


async def test_a_failed_sleep_of_engines_is_repeated():
    device = Device()
    device.trainer = {"weights"}
    colocation, devices, trainer, engines = await colocated(device)
    device.paused, each, tries = False, engines.call_all, []

    async def refuses_once(method, *args):
        tries.append(method)
        if len(tries) == 1:
            raise EngineError("not now")
        return await each(method, *args)

    engines.call_all = refuses_once
    with pytest.raises(EngineError, match="not now"):
        async with colocation.train():
            raise AssertionError("the engines hold the devices")
    async with colocation.train(), devices.turn(trainer):
        assert device.engine == set()
