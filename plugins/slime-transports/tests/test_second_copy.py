"""Servers that compare what they hold with a second copy (`compares_sent`), by every transport, without a server."""

from pathlib import Path

import pytest
import torch

from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError
from slime_transports.in_process_server import InProcessReceiver, InProcessServer
from slime_transports.plugin import Delta, Disk, Distributed, Ipc
from slime_transports.receiver import Refused, ServerEndpoint

WEIGHTS = {f"layer.{number}": torch.arange(number, number + 9.0) for number in range(4)}


class Comparing:
    """A server that loads buckets, or compares them with what it holds."""

    def __init__(self):
        self.held, self.versions, self.compares = {}, [], False
        self.server = InProcessServer(self.take)

    def take(self, bucket):
        start = 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            size = 4 * torch.Size(shape).numel()
            tensor = torch.from_numpy(bucket.data[start : start + size].copy()).view(torch.float32).view(shape)
            start += size
            if self.compares and not torch.equal(self.held[name], tensor):
                raise EngineError(f"{name} differs")
            if not self.compares:
                self.held[name] = tensor
        if bucket.last:
            self.versions.append(("compared" if self.compares else "loaded", bucket.version))


class ComparingReceiver(InProcessReceiver):
    compares_sent = True
    found = {}
    """By URL."""

    @property
    def comparing(self):
        return self.found[self.server.address]

    async def begin(self):
        self.comparing.compares = False

    async def begin_comparison(self):
        self.comparing.compares = True

    async def load_folder(self, folder, version):
        await self.begin()
        await super().load_folder(folder, version)

    async def compare_folder(self, folder, version):
        await self.begin_comparison()
        await super().load_folder(folder, version)


@pytest.fixture
def servers(monkeypatch):
    found = {f"http://127.0.0.1:1/{number}": Comparing() for number in range(2)}
    for url, server in found.items():
        monkeypatch.setitem(InProcessReceiver.servers, url, server.server)
        monkeypatch.setitem(ComparingReceiver.found, url, server)
    return found


@pytest.fixture(params=[Ipc, Distributed, Disk, Delta])
def send(request, servers, tmp_path):
    """Sends an export, and returns the report."""
    driver = request.param
    sender = driver.build_sender(driver.Config(update_weight_buffer_size=64, check_weight_update_equal=True))
    sender.setup(SenderSetup(rank=0, world_size=1, device="cpu", colocated=True, model_path=tmp_path, run_dir=tmp_path))
    engines = [ServerEndpoint(index=n, url=url, receiver=ComparingReceiver) for n, url in enumerate(servers)]
    yield lambda export, version: sender.send(export, version, engines)
    sender.close()


class Export:
    """Counts how often it was begun, and how often it was read to its end."""

    def __init__(self, *copies):
        self.copies, self.begun, self.ended = copies, 0, 0

    def __call__(self, *, all_ranks):
        weights = self.copies[min(self.begun, len(self.copies) - 1)]
        self.begun += 1
        yield from ({name: tensor.clone()} for name, tensor in weights.items())
        self.ended += 1


def test_a_version_is_read_and_sent_twice(send, servers):
    for version in (1, 2):
        export = Export({name: tensor + version for name, tensor in WEIGHTS.items()})
        report = send(export, version)
        assert (report.compared_with, report.buckets, export.begun, export.ended) == ("trainer", 4, 2, 2)
    for server in servers.values():
        assert server.versions == [("loaded", 1), ("compared", 1), ("loaded", 2), ("compared", 2)]
        assert {name: tensor.tolist() for name, tensor in server.held.items()} == {
            name: (tensor + 2).tolist() for name, tensor in WEIGHTS.items()
        }


def test_a_server_that_holds_something_else_fails_the_update(send, servers):
    """Of one server alone, after a version of which only a little is new: a delta's second copy is whole, too."""
    send(Export(WEIGHTS), 1)
    changed = WEIGHTS | {"layer.3": WEIGHTS["layer.3"] + 1}
    other = list(servers.values())[1]

    class Meanwhile(Export):
        def __call__(self, *, all_ranks):
            if self.begun == 1:
                other.held["layer.1"][4] += 1
            return super().__call__(all_ranks=all_ranks)

    export = Meanwhile(changed)
    with pytest.raises(EngineError, match=r"version 2.*layer\.1 differs"):
        send(export, 2)
    assert (export.begun, export.ended) == (2, 2)
    assert send(Export(changed), 2).compared_with == "trainer"


def test_after_a_failed_update_nothing_is_compared(send, servers, monkeypatch):
    first = next(iter(servers.values()))

    def refuse(bucket):
        raise Refused("no room")

    export = Export(WEIGHTS)
    with monkeypatch.context() as patched:
        patched.setattr(first.server, "_receive", refuse)
        with pytest.raises(EngineError, match="no room"):
            send(export, 1)
    assert (export.begun, export.ended) == (1, 1)
    assert send(export, 1).compared_with == "trainer"


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_servers_elsewhere_find_a_relative_run_folder(driver, servers, tmp_path, monkeypatch):
    """Servers that a run did not start have another working folder."""
    monkeypatch.chdir(tmp_path)
    asked = []

    class Elsewhere(ComparingReceiver):
        async def load_folder(self, folder, version):
            asked.append(folder)
            await super().load_folder(folder, version)

    sender = driver.build_sender(driver.Config())
    sender.setup(
        SenderSetup(rank=0, world_size=1, device="cpu", colocated=True, model_path=tmp_path, run_dir=Path("runs/own"))
    )
    (url, *_) = servers
    sender.send(Export(WEIGHTS), 1, [ServerEndpoint(index=0, url=url, receiver=Elsewhere)])
    sender.close()
    assert [folder.parent for folder in asked] == [tmp_path / "runs" / "own" / "weights"]
