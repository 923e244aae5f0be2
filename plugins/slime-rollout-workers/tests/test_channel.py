"""Messages and errors between two ends of a socket."""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
from collections import defaultdict

import pytest

from slime_core.errors import ConfigError, EngineUnavailable, PluginError
from slime_rollout_workers.channel import PACKET_MESSAGES, READ_AHEAD, Channel, packet
from slime_rollout_workers.travelling_error import WorkerError, packed, raised_here
from slime_rollout_workers.worker_requests import WorkerCaller


async def test_messages_arrive_in_order_also_large_ones():
    here, there = socket.socketpair()
    sender, receiver = await Channel.over(here), await Channel.over(there)
    received: list[object] = []
    reading = asyncio.create_task(receiver.read(received.append))
    sent = [{"number": n, "content": b"x" * (3 * READ_AHEAD if n == 2 else n)} for n in range(5)]
    for message in sent[:3]:
        sender.send(message)
    # Those of one turn are one pickle: equal objects stay one.
    assert not received
    await asyncio.sleep(0)
    for message in sent[3:]:
        sender.send(message)
    await sender.close()
    await asyncio.wait_for(reading, 30)
    assert received == sent
    # The other end is gone.
    receiver.send("lost")
    await receiver.close()


async def test_many_messages_of_a_turn_do_not_wait_for_its_end():
    here, there = socket.socketpair()
    there.settimeout(5)
    sender = await Channel.over(here)
    for number in range(PACKET_MESSAGES + 1):
        sender.send(number)
    # The first ones are on their way in the same turn.
    length = int.from_bytes(there.recv(8, socket.MSG_WAITALL))
    assert pickle.loads(there.recv(length, socket.MSG_WAITALL)) == list(range(PACKET_MESSAGES))  # noqa: S301
    assert select.select([there], [], [], 0)[0] == []
    await sender.close()
    length = int.from_bytes(there.recv(8, socket.MSG_WAITALL))
    assert pickle.loads(there.recv(length, socket.MSG_WAITALL)) == [PACKET_MESSAGES]  # noqa: S301
    there.close()


async def test_what_an_end_sent_before_it_died_is_read():
    here, there = socket.socketpair()
    receiver = await Channel.over(here)
    # It dies without having read: the connection is reset, not closed.
    receiver.send("unread")
    await asyncio.sleep(0)
    packets = [b"".join(packet([number])) for number in range(64)]
    there.sendall(b"".join(packets))
    there.close()
    received: list[int] = []
    await asyncio.wait_for(receiver.read(received.append), 30)
    assert received == list(range(64))
    await receiver.close()


async def test_who_reads_many_messages_lets_others_work_between_them():
    here, there = socket.socketpair()
    sender, receiver = await Channel.over(here), await Channel.over(there)
    turns = 0
    seen: list[int] = []

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for number in range(4 * PACKET_MESSAGES):
        sender.send(number)
    await sender.close()
    # All are in the receiver's buffer before it reads the first.
    await asyncio.sleep(0.05)
    working = asyncio.create_task(others())
    await receiver.read(lambda _: seen.append(turns))
    working.cancel()
    assert seen[0] < seen[PACKET_MESSAGES] < seen[2 * PACKET_MESSAGES] < seen[-1]
    await receiver.close()


async def test_a_message_that_cannot_be_pickled_is_lost_alone():
    here, there = socket.socketpair()
    sender, receiver = await Channel.over(here), await Channel.over(there)
    received: list[object] = []
    reading = asyncio.create_task(receiver.read(received.append))
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    sender.send("before")
    sender.send(defaultdict(lambda: 0), lambda error: sender.send(f"instead: {type(error).__name__}"))
    # No one waits for it.
    sender.send(defaultdict(lambda: 1))
    sender.send("after")
    await sender.close()
    await asyncio.wait_for(reading, 30)
    assert received == ["before", "after", "instead: AttributeError"]
    assert [report["message"] for report in reported] == ["defaultdict cannot be sent"]
    await receiver.close()


class Torn(dict[str, int]):
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


async def test_a_message_that_cannot_be_unpickled_is_an_error_of_who_reads():
    here, there = socket.socketpair()
    sender, receiver = await Channel.over(here), await Channel.over(there)
    sender.send(Torn())
    with pytest.raises(PluginError, match=r"unpickle: raised ValueError: .*no number"):
        await asyncio.wait_for(receiver.read(lambda message: None), 30)
    await sender.close()
    await receiver.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(), EOFError()])
async def test_an_error_of_who_takes_a_message_is_no_lost_connection(error: Exception):
    here, there = socket.socketpair()
    sender, receiver = await Channel.over(here), await Channel.over(there)

    def take(message: object) -> None:
        raise error

    sender.send("a message")
    with pytest.raises(type(error)):
        await asyncio.wait_for(receiver.read(take), 30)
    await sender.close()
    await receiver.close()


async def test_an_end_that_no_one_reads_is_closed_at_once():
    """Children of a process that was killed hold the other end."""
    here, there = socket.socketpair()
    channel = await Channel.over(here)
    with there:
        channel.send(b"x" * (3 * READ_AHEAD))
        await asyncio.sleep(0)
        await asyncio.wait_for(channel.abort(), 30)
    assert here.fileno() == -1


class Peculiar(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (EngineUnavailable("engine 0 is gone"), EngineUnavailable, "engine 0 is gone"),
        (ConfigError(["one", "two"]), ConfigError, "one\ntwo"),
        # It can be pickled, and not unpickled.
        (Peculiar(1, 2), WorkerError, "Peculiar: 1 and 2"),
    ],
)
async def test_an_error_is_raised_where_it_is_awaited(error: Exception, kind: type[Exception], text: str):
    here, there = socket.socketpair()
    sender, receiver = await Channel.over(here), await Channel.over(there)
    received: list[Exception] = []
    reading = asyncio.create_task(receiver.read(received.append))
    try:
        raise error
    except (EngineUnavailable, ConfigError, Peculiar) as raised:
        sender.send(packed(raised))
    await sender.close()
    await asyncio.wait_for(reading, 30)
    arrived = raised_here(received[0])
    assert type(arrived) is kind
    assert text in str(arrived)
    assert "test_an_error_is_raised_where_it_is_awaited" in str(arrived.__cause__)
    await receiver.close()


def test_in_a_third_process_a_request_has_no_caller():
    """An engine that is an actor makes its calls itself."""

    async def call(asked: object) -> object:
        return asked

    assert pickle.loads(pickle.dumps(WorkerCaller(call))) is None  # noqa: S301 - made here
