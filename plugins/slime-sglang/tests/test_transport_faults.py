"""State after a failed weight update, and the error that the run gets. Servers hold no model; ranks that share devices are
threads, whose device is a CPU."""

import errno
import logging
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from sent_weights import Engine, weights
from weight_server import FakeServer

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError, StorageError
from slime_transports import folder, ipc
from slime_transports.broadcast import BroadcastGroup
from slime_transports.equality import parts_held
from slime_transports.handles import SharedMemory
from slime_transports.loading import servers_that_verify
from slime_transports.plugin import Delta, Disk, Ipc
from slime_transports.servers import Servers


class Rank:
    """One of several: its sender agrees with those of the other threads."""

    def __init__(self, rank, sent_turns, barrier, run_dir):
        self.sender = Ipc.build_sender(Ipc.Config(update_weight_buffer_size=40, update_weights_timeout=10))
        where = {"model_path": run_dir, "run_dir": run_dir, "colocated": True}
        setup = SenderSetup(rank=rank, world_size=1, device="cpu", **where)
        self.sender.setup(setup)
        self.sender._place = replace(setup, world_size=len(sent_turns), device="cuda")
        self.rank, self.sent_turns, self.barrier = rank, sent_turns, barrier
        self.sender.all_gather = self.all_gather
        self.memories = []

    def all_gather(self, own):
        self.sent_turns[self.rank] = own
        self.barrier.wait(20)
        heard = list(self.sent_turns)
        self.barrier.wait(20)
        return heard

    def outcome(self, function):
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - the test asks which
            return error

    def push(self, version, endpoints):
        def export(*, all_ranks):
            assert all_ranks
            yield from ({name: tensor} for name, tensor in weights(version).items())

        return self.outcome(lambda: self.sender.send(export, version, endpoints))


@pytest.fixture
def crew(stack, tmp_path, monkeypatch):
    """`crew(2)`: ranks, and a function that has each do something at once. Their memories are noted."""
    here = threading.local()

    class Memory(SharedMemory):
        def __init__(self, bucket):
            super().__init__(bucket)
            self.released = 0
            here.rank.memories.append(self)
            stack.callback(self.close)

        def release(self):
            self.released += 1

    monkeypatch.setattr(ipc, "DeviceMemory", Memory)

    def build(size):
        sent_turns, barrier = [None] * size, threading.Barrier(size)
        found = [Rank(rank, sent_turns, barrier, tmp_path) for rank in range(size)]
        for rank in found:
            stack.callback(rank.sender.close)

        def all_at_once(act):
            def run(rank):
                here.rank = rank
                return act(rank)

            with ThreadPoolExecutor(size) as threads:
                return list(threads.map(run, found))

        return found, all_at_once

    return build


# -------------------------------------------------------------------- handles


def test_a_rank_whose_engine_gets_nothing_makes_no_handle(crew, stack):
    """A weight update of one engine of two: torch would keep every bucket that no reader opens."""
    ranks, all_at_once = crew(2)
    engines = [Engine(stack, index) for index in range(2)]
    reports = all_at_once(lambda rank: rank.push(1, [engines[1].endpoint]))
    assert [report.buckets > 2 for report in reports] == [False, True]
    assert engines[1].holds(weights(1))
    assert [len(rank.memories) for rank in ranks] == [0, reports[1].buckets]
    all_at_once(lambda rank: rank.push(2, [engine.endpoint for engine in engines]))
    assert all(engine.holds(weights(2)) for engine in engines)
    assert len(ranks[0].memories) == reports[1].buckets
    assert not any(memory.released for rank in ranks for memory in rank.memories)


def test_a_handle_that_was_not_sent_is_released(crew, stack):
    """One engine refuses a bucket: it has given up by itself what it read. The other rank has its next handle ready."""
    ranks, all_at_once = crew(2)
    engines = [Engine(stack, index) for index in range(2)]
    engines[0].refuse = 1
    outcomes = all_at_once(lambda rank: rank.push(1, [engine.endpoint for engine in engines]))
    assert all(isinstance(outcome, EngineError) and "refused for the test" in str(outcome) for outcome in outcomes)
    assert [memory.released for memory in ranks[0].memories] == [0, 0]
    assert [memory.released for memory in ranks[1].memories] == [0, 0, 1]


def test_handles_of_a_dead_engine_are_released_on_all_its_ranks(crew, stack):
    """Its first rank alone asks it. A third rank, of an engine that lives, keeps what that one reads."""
    ranks, all_at_once = crew(3)
    dead, alive = Engine(stack, 0), Engine(stack, 2)
    dead.endpoint = replace(dead.endpoint, num_ranks=2)

    def hang_up(path, body):
        raise ConnectionResetError

    dead.partner.respond = hang_up
    outcomes = all_at_once(lambda rank: rank.push(1, [dead.endpoint, alive.endpoint]))
    assert all(isinstance(outcome, EngineError) and "engine 0" in str(outcome) for outcome in outcomes)
    assert [[memory.released for memory in rank.memories] for rank in ranks] == [[1], [1, 1], [0, 1]]


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (StorageError("disk"), None, StorageError),
        (EngineError("engine 3 is out"), None, EngineError),
        (None, TypeError("bug"), RuntimeError),
        (EngineError("engine 3 is out"), StorageError("disk"), StorageError),
        (RuntimeError("out of memory"), StorageError("disk"), RuntimeError),
    ],
)
def test_all_ranks_fail_with_one_kind_of_error(crew, first, second, kind):
    """Which rank's is heard first is chance, and an EngineError has engines healed."""
    _, all_at_once = crew(2)

    def fail(rank, error):
        with rank.sender.failing_together():
            if error is not None:
                raise error

    errors = all_at_once(lambda rank: rank.outcome(lambda: fail(rank, (first, second)[rank.rank])))
    own = next(error for error in (first, second) if error is not None and isinstance(error, (kind, TypeError)))
    assert own in errors
    (other,) = [error for error in errors if error is not own]
    assert type(other) is kind
    assert str(other).startswith("another trainer rank could not send weights: ")
    assert str(own) in str(other)


def test_a_trainer_without_memory_is_no_error_of_engines(crew, stack, monkeypatch):
    _, all_at_once = crew(2)
    engines = [Engine(stack, index) for index in range(2)]
    make, once = ipc.DeviceMemory, iter([True])

    def fail(bucket):
        if bucket.index == 1 and next(once, False):
            raise RuntimeError("out of memory")
        return make(bucket)

    monkeypatch.setattr(ipc, "DeviceMemory", fail)
    outcomes = all_at_once(lambda rank: rank.push(1, [engine.endpoint for engine in engines]))
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, RuntimeError]
    assert all("out of memory" in str(outcome) for outcome in outcomes)


def test_of_several_failures_that_of_the_first_call_is_raised(stack):
    servers = Servers(5.0)
    stack.callback(servers.close)
    for first in range(4):
        calls = [Future() for _ in range(20)]
        for number, call in enumerate(calls):
            call.set_exception(EngineError(f"engine {number}")) if number >= first else call.set_result({})
        with pytest.raises(EngineError, match=f"^engine {first}$"):
            servers.wait(calls)


def test_silence_is_no_refusal(stack):
    """No response of a server does not mean that it cannot check what it loads."""
    servers, impatient = Servers(20.0), Servers(0.2)
    stack.callback(servers.close)
    stack.callback(impatient.close)
    able, unable = Engine(stack, 0), Engine(stack, 1)

    def refuse(body):
        raise EngineError("Unsupported action")

    unable.partner._check = refuse
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    unused = stack.enter_context(socket.socket())
    unused.bind(("127.0.0.1", 0))
    hung, gone = (
        replace(able.endpoint, index=2, url=f"http://127.0.0.1:{place.getsockname()[1]}") for place in (silent, unused)
    )
    assert servers_that_verify(servers, [able.endpoint, unable.endpoint]) == [able.endpoint]
    with pytest.raises(EngineError, match=r"engine 2 .*no server responds"):
        servers_that_verify(servers, [able.endpoint, unable.endpoint, gone])
    with pytest.raises(EngineError, match=r"engine 2 .*got no response"):
        servers_that_verify(impatient, [hung])
    # Nor that it cannot report its shards, so that the others would only be compared with each other.
    (outcome,) = parts_held(servers, [unable.endpoint], 1, digests=False)
    assert isinstance(outcome, EngineError)
    with pytest.raises(EngineError, match=r"checking version 1: engine 2 .*no server responds"):
        parts_held(servers, [unable.endpoint, gone], 1, digests=False)


class AskedAtOnce(FakeServer):
    """Responds only after the other one has been called too."""

    barrier = threading.Barrier(2)

    @property
    def server_info(self):
        self.barrier.wait(10)
        return {}

    @server_info.setter
    def server_info(self, value):
        pass


def test_draft_flags_are_read_from_all_engines_at_once(ranks, stack, monkeypatch):
    monkeypatch.setattr("sent_weights.FakeServer", AskedAtOnce)
    engines = [Engine(stack, 0), Engine(stack, 1)]
    ranks(Ipc).send(weights(1), 1, *engines)
    assert all(engine.holds(weights(1)) for engine in engines)


# -------------------------------------------------------------------- folders


def test_a_delta_stays_until_the_next_update_has_ended(ranks, stack, tmp_path):
    """A server with pipeline stages responds when the first of them has read it."""
    engine, rank, root = Engine(stack), ranks(Delta), tmp_path / "weights"
    seen = []
    respond = engine.partner.respond

    def look(path, body):
        if path == "/update_weights_from_disk":
            seen.append({Path(body["model_path"]).name, *(entry.name for entry in root.iterdir())})
        return respond(path, body)

    engine.partner.respond = look
    rank.send(weights(1), 1, engine)
    rank.send(weights(2), 2, engine)
    (second,) = {entry.name for entry in root.iterdir()}
    assert second.startswith("2-from-")
    ((first,), both) = seen
    assert first.startswith("1-")
    assert both == {first, second}
    rank.sender.close()
    assert not root.exists()


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_a_version_that_is_sent_again_replaces_no_file(driver, ranks, stack, tmp_path):
    """The server's later pipeline stages may still read what was sent before another engine was lost."""
    engine, rank, root = Engine(stack), ranks(driver), tmp_path / "weights"
    successors = [Engine(stack, 1), Engine(stack, 2)]
    rank.send(weights(1), 1, engine)
    first = {path: path.stat().st_ino for path in root.glob("*/*")}
    rank.send(weights(1), 1, successors[0])
    assert {path: path.stat().st_ino for path in first} == first
    assert len(list(root.iterdir())) == 2
    # The disk has to hold two, however often engines are lost.
    rank.send(weights(1), 1, successors[1])
    assert len(list(root.iterdir())) == 2
    rank.send(weights(2), 2, engine)
    (folder_of_second,) = root.iterdir()
    assert folder_of_second.name.startswith("2-")
    assert engine.holds(weights(2))


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_a_folder_that_cannot_be_removed_is_no_error_of_an_update(driver, ranks, stack, monkeypatch, tmp_path, caplog):
    """NFS keeps a folder while a server still reads one of its files."""

    def busy(path, *args, **kwargs):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    engine, rank = Engine(stack), ranks(driver)
    (tmp_path / "weights" / "0").mkdir(parents=True)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(shutil, "rmtree", busy)
        rank.send(weights(1), 1, engine)
        rank.send(weights(2), 2, engine)
        assert engine.holds(weights(2))
        assert f"{tmp_path / 'weights' / '0'}: old weights could not be removed" in caplog.text
        engine.refuse = 0
        with pytest.raises(EngineError, match="refused for the test"):
            rank.send(weights(3), 3, engine)
        engine.refuse = None
        # An error of a folder that must be written is an error of the disk.
        (tmp_path / "weights" / f"x{folder.WRITING}").mkdir()
        with pytest.raises(StorageError, match="cannot be written"):
            folder.begin(tmp_path / "weights" / "x")
        rank.sender.close()
    assert (tmp_path / "weights" / "0").exists()


def test_a_folder_in_the_way_of_a_finished_one(tmp_path, monkeypatch):
    beside = folder.begin(tmp_path / "7")
    monkeypatch.setattr(folder.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOTEMPTY, "full")))
    with pytest.raises(StorageError, match="cannot be written"):
        folder.finish(beside, folder.Manifest(version=7, identity="x", buckets=()))


# -------------------------------------------------------------------- groups


def test_an_engine_without_an_address_is_named(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    engine = EngineEndpoint(index=4, url="http://gone.example:30000")
    with pytest.raises(EngineError, match=r"engine 4 \(http://gone.example:30000\): .*not known"):
        BroadcastGroup("group", [engine], device="cpu", timeout_s=5)


def test_engines_may_have_ipv6_addresses():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    group = BroadcastGroup("six", [EngineEndpoint(index=0, url="http://[::1]:30000")], device="cpu", timeout_s=5)
    assert group.address == "::1"
    store = torch.distributed.TCPStore("::1", group.port, timeout=timedelta(seconds=5))
    store.set("key", "value")
    assert group._store.get("key") == b"value"


def test_a_broadcast_that_hangs_does_not_keep_the_process(tmp_path):
    code = (
        "import time\n"
        "from slime_transports.broadcast_thread import BroadcastThread\n"
        "thread = BroadcastThread()\n"
        "assert thread.submit(max, 1, 2).result() == 2\n"
        "failed = thread.submit(int, 'x').exception()\n"
        "assert isinstance(failed, ValueError)\n"
        "thread.submit(time.sleep, 600)\n"
        "thread.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_two_ranks_of_a_group(tmp_path):
    """Two ranks of the trainer, and of a server: see the script."""
    script = Path(__file__).parent / "two_ranks_agree.py"
    both = [subprocess.Popen([sys.executable, script, str(rank), tmp_path]) for rank in range(2)]
    try:
        assert [process.wait(240) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
