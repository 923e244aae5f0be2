"""Who holds what on shared devices, in which phase: by what trainers and engines are told, in order."""

import asyncio

import pytest

from slime_core.contracts.engine import Memory
from slime_core.errors import EngineError
from slime_core.workers.colocation import Residency
from slime_core.workers.devices import Devices


class Device:
    """What trainer and engine hold; the whole of both does not fit."""

    def __init__(self):
        self.log = []
        self.trainer = {"weights", "others"}
        self.engine = set(Memory)
        self.paused = False

    def note(self, line):
        self.log.append(line)
        both = len(self.trainer) + len(self.engine)
        assert both <= 3, f"{line}: trainer {self.trainer} and engine {self.engine} hold too much at once"


class Trainer:
    def __init__(self, device):
        self.device = device

    async def each(self, method, *args):
        await asyncio.sleep(0)
        part = bool(args and args[0])
        if method == "sleep":
            self.device.trainer &= {"weights"} if part else set()
        else:
            self.device.trainer |= {"weights"} if part else {"weights", "others"}
        self.device.note(f"trainer {method}{' weights' if part else ''}")


class Engines:
    num_engines = 1

    def __init__(self, device):
        self.device = device

    async def each(self, method, *args):
        await asyncio.sleep(0)
        if method == "sleep":
            assert self.device.paused
            self.device.engine -= set(args[0])
        elif method == "wake":
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
    return Residency(devices, engines, **settings), devices, trainer, engines


async def publish(residency, trainer, engines, device):
    await engines.each("pause")
    async with residency.sync(trainer):
        assert device.trainer == {"weights"}
        assert device.engine == {Memory.WEIGHTS}
        device.log.append("push")
    await residency.rollout()
    assert device.trainer == set()
    assert device.engine == set(Memory)
    assert not device.paused


async def step(residency, devices, trainer, device):
    await residency.rollout()
    device.log.append("generate")
    async with residency.train(), devices.turn(trainer):
        assert device.trainer == {"weights", "others"}
        assert device.engine == set()
        device.log.append("train")
    async with residency.train(), devices.turn(trainer):
        device.log.append("save")


async def test_a_colocated_run():
    """generate, engine sleeps, trainer wakes, train, save, trainer keeps its weights, engine takes its own, publish,
    trainer sleeps, engine takes the rest."""
    device = Device()
    device.trainer = {"weights"}
    residency, devices, trainer, engines = await colocated(device)
    device.log.clear()
    await publish(residency, trainer, engines, device)
    assert device.log == [
        "engine pause", "engine pause", "engine sleep kv_cache cuda_graph", "trainer wake weights", "push",
        "trainer sleep", "engine wake kv_cache cuda_graph", "engine resume",
    ]  # fmt: skip
    device.log.clear()
    await step(residency, devices, trainer, device)
    await publish(residency, trainer, engines, device)
    assert device.log == [
        "generate", "engine pause", "engine sleep weights kv_cache cuda_graph", "trainer wake", "train", "save",
        "engine pause", "trainer sleep weights", "engine wake weights", "push",
        "trainer sleep", "engine wake kv_cache cuda_graph", "engine resume",
    ]  # fmt: skip
    # A step after which nothing is published: the engines' weights come back from the host.
    await step(residency, devices, trainer, device)
    device.log.clear()
    await residency.rollout()
    assert device.log == ["trainer sleep", "engine wake weights kv_cache cuda_graph", "engine resume"]


async def test_what_moving_memory_took_is_told_once():
    device = Device()
    device.trainer = {"weights"}
    residency, devices, trainer, engines = await colocated(device)
    assert residency.times().keys() == {"perf/sleep_time"}, "settling"
    await publish(residency, trainer, engines, device)
    await step(residency, devices, trainer, device)
    times = residency.times()
    assert times.keys() == {f"perf/{who}{move}_time" for who in ("", "engine_") for move in ("sleep", "wake_up")}
    assert all(seconds > 0 for seconds in times.values())
    assert residency.times() == {}


@pytest.mark.parametrize(("offload_train", "offload_rollout"), [(True, False), (False, True), (False, False)])
async def test_either_side_may_stay(offload_train, offload_rollout, monkeypatch):
    device = Device()
    monkeypatch.setattr(device, "note", device.log.append)
    residency, devices, trainer, engines = await colocated(
        device, offload_train=offload_train, offload_rollout=offload_rollout
    )
    device.log.clear()
    async with residency.train(), devices.turn(trainer):
        pass
    await engines.each("pause")
    async with residency.sync(trainer):
        pass
    await residency.rollout()
    moved = {line.split()[0] for line in device.log if "sleep" in line or "wake" in line}
    assert moved == {name for name, on in (("trainer", offload_train), ("engine", offload_rollout)) if on}


async def test_phases_exclude_each_other_only_where_memory_is_given_back():
    device = Device()
    device.trainer = {"weights"}
    residency, devices, trainer, engines = await colocated(device)
    await engines.each("pause")

    async def train():
        async with residency.train(), devices.turn(trainer):
            before = list(device.log)
            await asyncio.sleep(0.01)
            assert device.log == before, "another phase has begun"

    await asyncio.gather(train(), residency.rollout(), train())
    apart = Residency(Devices(), engines, shared=False, offload_rollout=False)
    async with apart.train():
        await asyncio.wait_for(apart.rollout(), 1)
        async with apart.sync(trainer):
            pass


async def test_an_engine_that_comes_back_gives_what_the_others_have_given():
    device, other = Device(), Device()
    device.trainer = {"weights"}
    residency, devices, trainer, _ = await colocated(device)
    async with residency.train(), devices.turn(trainer):
        pass
    newcomer = Engines(other)
    other.trainer = set()
    await newcomer.each("pause")
    async with residency.sync(trainer, beside=newcomer):
        assert other.engine == device.engine == {Memory.WEIGHTS}
    await residency.rollout(beside=newcomer)
    assert other.engine == device.engine == set(Memory)


async def test_engines_that_were_told_to_wake_are_put_to_sleep_though_that_was_broken_off(monkeypatch):
    """By Ctrl-C: what was trained is saved next, and needs the devices."""
    device = Device()
    residency, devices, trainer, engines = await colocated(device)
    async with residency.train(), devices.turn(trainer):
        pass
    each, woken = engines.each, asyncio.Event()

    async def wakes_all_the_same(method, *args):
        await each(method, *args)
        woken.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(engines, "each", wakes_all_the_same)
        waking = asyncio.create_task(residency.rollout())
        await woken.wait()
        waking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waking
    async with residency.train(), devices.turn(trainer):
        assert device.engine == set()


async def test_engines_that_could_not_be_put_to_sleep_are_told_again():
    device = Device()
    device.trainer = {"weights"}
    residency, devices, trainer, engines = await colocated(device)
    device.paused, each, tries = False, engines.each, []

    async def refuses_once(method, *args):
        tries.append(method)
        if len(tries) == 1:
            raise EngineError("not now")
        return await each(method, *args)

    engines.each = refuses_once
    with pytest.raises(EngineError, match="not now"):
        async with residency.train():
            raise AssertionError("the engines hold the devices")
    async with residency.train(), devices.turn(trainer):
        assert device.engine == set()
