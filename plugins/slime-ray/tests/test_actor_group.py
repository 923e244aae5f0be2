"""Which failure of one call ends the calls of others; without a cluster."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from slime_core.errors import EngineError, EngineRefused
from slime_plugin_kit.fast_clock import run_fast
from slime_ray.actor_group import NOTICE_S, ActorGroup, Member, Roster

GRACE_S = 10.0


def machines(count: int) -> list[Member]:
    return [Member(actor=None, name=f"engine 0, machine {number}", failure=EngineError) for number in range(count)]


def new_group() -> ActorGroup:
    return ActorGroup(Roster(), grace_s=GRACE_S, shutdown_method="stop")


async def long() -> str:
    await asyncio.sleep(6 * GRACE_S)
    return "generated"


async def raising(error: Exception) -> str:
    raise RayTaskError("call", "remote traceback", error)


async def raising_as_ray_does(error: Exception) -> str:
    raise RayTaskError("call", "remote traceback", error).as_instanceof_cause()


@pytest.mark.parametrize("refused", [raising, raising_as_ray_does])
def test_a_refused_request_ends_no_call(refused):
    """Neither one of the same machine nor one of another."""

    async def scene():
        group, (serving, beside) = new_group(), machines(2)
        others = [asyncio.create_task(group.run(member, long(), "generate")) for member in (serving, beside)]
        with pytest.raises(EngineRefused, match="no images"):
            await group.run(serving, refused(EngineRefused("it takes no images")), "generate")
        assert await asyncio.gather(*others) == ["generated"] * 2
        assert not group.has_died

    run_fast(scene())


def test_calls_of_one_member_do_not_wait_for_each_other():
    """Whether an engine that failed one request is replaced, its health monitor decides."""

    async def scene():
        group, (serving,) = new_group(), machines(1)
        other = asyncio.create_task(group.run(serving, long(), "generate"))
        with pytest.raises(EngineError, match="out of memory"):
            await group.run(serving, raising(EngineError("out of memory")), "generate")
        assert await other == "generated"
        assert not group.has_died

    run_fast(scene())


def test_another_member_in_the_same_call_is_given_up_after_the_grace():
    async def scene():
        group, (serving, beside) = new_group(), machines(2)
        now = asyncio.get_running_loop().time
        waiting = asyncio.create_task(group.run(beside, long(), "health"))
        with pytest.raises(EngineError, match="a server is gone"):
            await group.run(serving, raising(EngineError("a server is gone")), "health")
        with pytest.raises(EngineError, match="a server is gone"):
            await waiting
        assert now() == GRACE_S
        assert group.has_died

    run_fast(scene())


async def dying(after_s: float) -> str:
    await asyncio.sleep(after_s)
    raise ActorDiedError


def test_a_collective_that_fails_beside_a_death_is_that_death():
    """The rank that lives loses its connection before Ray reports the other one's end."""

    async def scene():
        group, (living, dead) = new_group(), machines(2)
        lost = asyncio.create_task(group.run(dead, dying(0.5 * NOTICE_S), "train"))
        with pytest.raises(EngineError, match="machine 1 did not start: The actor died"):
            await group.run(living, raising(RuntimeError("connection closed by peer")), "train")
        with pytest.raises(EngineError, match="machine 1"):
            await lost
        assert group.has_died

    run_fast(scene())


def test_an_error_beside_a_call_that_continues_is_raised_soon():
    async def scene():
        group, (serving, beside) = new_group(), machines(2)
        now = asyncio.get_running_loop().time
        waiting = asyncio.create_task(group.run(beside, long(), "train"))
        with pytest.raises(RuntimeError, match="a bug in the loss"):
            await group.run(serving, raising(RuntimeError("a bug in the loss")), "train")
        assert now() == NOTICE_S
        with pytest.raises(RuntimeError, match="a bug in the loss"):
            await waiting
        assert now() == NOTICE_S + GRACE_S

    run_fast(scene())
