"""Ranks meet at one address, which no other interface serves."""

import os
import socket
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from slime_core.errors import TrainingError
from slime_training.process_group import make_single_group
from slime_training.rendezvous import (
    address_towards,
    interface_of,
    listen_with_gloo_near,
    listening_store,
    meet,
    on_one_address,
)

JOINED = """
import sys
import torch, torch.distributed as dist
from types import SimpleNamespace
from slime_plugin_kit.listening_sockets import listening_sockets
from slime_training.process_group import join_group
rank, place = int(sys.argv[1]), sys.argv[2]
join_group(SimpleNamespace(role="actor", rank=rank, world_size=2, device="cpu", rendezvous=f"tcp://{place}"))
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2
print(*{own.address for own in listening_sockets()})
dist.barrier()
"""


def test_ranks_that_joined_listen_on_loopback_alone():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", JOINED]
    # Whatever the name of the machine resolves to.
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    ranks = [
        subprocess.Popen([*command, str(rank), place], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [["127.0.0.1"]] * 2
    finally:
        for rank in ranks:
            rank.kill()


def test_a_store_listens_on_its_address_alone():
    before = set(listening())
    store = listening_store("127.0.0.1")
    assert set(listening()) - before == {("127.0.0.1", store.port)}


def test_an_address_that_is_not_the_first_ranks_is_reported():
    with pytest.raises(TrainingError) as raised:
        next(meet("one-address://192.0.2.77:29500?rank=0&world_size=2"))
    assert str(raised.value) == (
        "rank 0 of 2 cannot listen on 192.0.2.77, port 29500, where the ranks meet: Cannot assign requested address. If that "
        "is no address of its machine, start Ray there with one (`ray start --node-ip-address ADDRESS`)."
    )


def test_other_ways_to_meet_are_left_to_torch():
    assert on_one_address("file:///tmp/meeting") == "file:///tmp/meeting"
    assert on_one_address("tcp://127.0.0.1:1") == "one-address://127.0.0.1:1"


def test_gloo_listens_on_the_interface_to_the_first_rank(monkeypatch):
    """Also with several machines: gloo's own choice is the address of the machine's name, which may be 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    listen_with_gloo_near("file:///tmp/meeting")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    listen_with_gloo_near("tcp://127.0.0.1:29500")
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    for name, addresses in psutil.net_if_addrs().items():
        for own in addresses:
            if own.family == socket.AF_INET and not own.address.startswith("127."):
                monkeypatch.delenv("GLOO_SOCKET_IFNAME")
                listen_with_gloo_near(f"tcp://{own.address}:29500")
                assert os.environ["GLOO_SOCKET_IFNAME"] == name
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    listen_with_gloo_near("tcp://127.0.0.1:29500")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"


def test_a_single_rank_listens_on_the_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    make_single_group()
    try:
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
        assert {address for address, _ in listening()} <= {"127.0.0.1"}
    finally:
        dist.destroy_process_group()


def test_a_machine_without_a_route_reports_it(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(
        TrainingError, match=r"^tcp://no-such-host.invalid:1, where the ranks meet: this machine has no route"
    ):
        listen_with_gloo_near("tcp://no-such-host.invalid:1")


def test_interfaces_are_found_by_address():
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.77") is None


def listening():
    connections = psutil.Process().net_connections("tcp")
    return [tuple(own.laddr) for own in connections if own.status == psutil.CONN_LISTEN]
