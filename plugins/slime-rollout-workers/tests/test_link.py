"""The driver's side of a worker: what it sends to which process, and whose error is whose."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.errors import PluginError, StorageError
from slime_core.rollout.groups import GroupRunner, RunningGroup
from slime_core.types.prompt import Prompt
from slime_rollout_workers import link as link_module
from slime_rollout_workers.channel import Unsendable, packet
from slime_rollout_workers.driver_group import DriverGroup
from slime_rollout_workers.link import Link
from slime_rollout_workers.messages import Question, Ready, Reply, StartGroup, Versions

PATIENCE_S = 30.0
TRAINED = range(5, 8)


class Process:
    """A worker that is ready at once. `sent` has what can be pickled."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.take = take
        self.sent: list[Any] = []
        self.reading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watch = SimpleNamespace(begin=lambda: None)
        self.pid = 1
        self.stopped = False

    def send(self, message: Any, unsendable: Unsendable | None = None) -> None:
        try:
            packet([message])
        except AttributeError as error:
            assert unsendable is not None
            unsendable(error)
        else:
            self.sent.append(message)

    @property
    def error(self) -> BaseException | None:
        return self.reading.exception()

    async def end(self) -> str:
        return "died (exit code -9)"

    async def stop(self) -> None:
        self.stopped = True


class Starts:
    """In the place of `WorkerProcess`."""

    def __init__(self) -> None:
        self.made: list[Process] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.starting = False

    async def start(self, setup: object, take: Callable[[Any], None], on_blocked: object) -> Process:
        self.starting = True
        await self.may_start.wait()
        self.starting = False
        self.made.append(Process(take))
        asyncio.get_running_loop().call_soon(take, Ready(None))
        return self.made[-1]


async def settled() -> None:
    """Everything that waits for nothing else has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    made = Starts()
    monkeypatch.setattr(link_module, "WorkerProcess", made)
    return made


async def started(served: Any = None) -> Link:
    setup: Any = SimpleNamespace(name="rollout worker 0")
    link = Link(setup, max_losses=3, faults=Counter(), on_blocked=lambda seconds, where: None)
    await link.start(served)
    return link


def group(number: int = 0, **metadata: Any) -> DriverGroup:
    prompt = Prompt(
        group_index=number, text="", token_ids=np.array([1], np.int32), origin=f"train.jsonl, line {number}",
        metadata=metadata,
    )  # fmt: skip
    runner: Any = SimpleNamespace(
        versions=lambda: TRAINED, on_failure=lambda failure: None, settings=SimpleNamespace(num_samples=1)
    )
    return DriverGroup(number=number, runner=runner, pickled=b"", running=RunningGroup(prompt=prompt))


async def test_a_new_process_gets_the_versions_too(starts: Starts) -> None:
    """Also if something was sent while it started."""
    link = await started()
    link.begin(group())
    assert [type(message) for message in starts.made[0].sent] == [Versions, StartGroup]
    starts.may_start.clear()
    starts.made[0].reading.set_result(None)
    await settled()
    assert starts.starting
    # A collector that aborts its groups.
    await link.stop_groups([])
    starts.may_start.set()
    await settled()
    process = starts.made[1]
    assert process.sent[0] == Versions(TRAINED)
    assert [type(message) for message in process.sent] == [Versions, StartGroup]
    await link.stop()


async def test_an_error_of_the_driver_is_the_runs_and_not_the_workers(starts: Starts) -> None:
    link = await started()
    first = group()
    link.begin(first)
    starts.made[0].reading.set_exception(StorageError("no space left on device"))
    with pytest.raises(StorageError, match="no space left"):
        await asyncio.wait_for(first.result, PATIENCE_S)
    # No other worker was started, and this one could end as it should.
    assert len(starts.made) == 1
    assert starts.made[0].stopped
    later = group(1)
    link.begin(later)
    with pytest.raises(StorageError, match="no space left"):
        await asyncio.wait_for(later.result, PATIENCE_S)
    await link.stop()


async def test_an_error_of_the_driver_while_a_worker_starts(starts: Starts) -> None:
    async def start(setup: object, take: Callable[[Any], None], on_blocked: object) -> Process:
        process = Process(take)
        asyncio.get_running_loop().call_soon(process.reading.set_exception, StorageError("no space left on device"))
        return process

    starts.start = start  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="no space left"):
        await asyncio.wait_for(started(), PATIENCE_S)


async def test_a_response_to_a_worker_that_has_died_does_not_reach_the_next_one(starts: Starts) -> None:
    """Which numbers its questions anew."""
    response: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def served() -> Any:
        async def servers() -> str:
            return await response

        return SimpleNamespace(servers=servers)

    link = await started(served)
    starts.made[0].take(Question(0, "servers", ()))
    await asyncio.sleep(0)
    starts.made[0].reading.set_result(None)
    await settled()
    process = starts.made[1]
    if not response.done():
        response.set_result("of the one before")
    await settled()
    assert not [message for message in process.sent if isinstance(message, Reply)]
    await link.stop()


async def test_a_group_that_cannot_be_sent_fails_alone(starts: Starts) -> None:
    link = await started()
    odd, plain = group(3, count=defaultdict(lambda: 0)), group(4)
    link.begin(odd)
    link.begin(plain)
    with pytest.raises(
        PluginError, match=r"^train\.jsonl, line 3: cannot be sent .*AttributeError: .*lambda"
    ) as raised:
        await asyncio.wait_for(odd.result, PATIENCE_S)
    assert isinstance(raised.value.__cause__, AttributeError)
    assert odd.ended.is_set()
    assert [message.number for message in starts.made[0].sent if isinstance(message, StartGroup)] == [4]
    assert not plain.result.done()
    await link.stop()
    with pytest.raises(Exception, match="was stopped"):
        await plain.result


async def test_a_reply_that_cannot_be_sent_is_an_error_where_it_was_asked(starts: Starts) -> None:
    async def served() -> Any:
        async def servers() -> Any:
            return defaultdict(lambda: 0)

        return SimpleNamespace(servers=servers)

    link = await started(served)
    starts.made[0].take(Question(0, "servers", ()))
    await settled()
    (reply,) = starts.made[0].sent
    assert isinstance(reply.result, PluginError)
    assert "servers of the engines that rewards ask: cannot be sent" in str(reply.result)
    await link.stop()


def test_a_runner_has_what_a_group_here_has() -> None:
    assert {"versions", "on_failure", "settings"} <= set(GroupRunner.__dataclass_fields__)
