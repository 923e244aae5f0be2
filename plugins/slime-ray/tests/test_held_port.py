"""A port that other processes get before one listens on it."""

import socket

import pytest
import torch.distributed as dist

from slime_ray.actors import held_port, port_of


def test_no_other_socket_gets_it():
    with held_port() as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port_of(held)))


def test_ranks_meet_there_while_it_is_held():
    with held_port() as held:
        store = dist.TCPStore("127.0.0.1", port_of(held), world_size=1, is_master=True)
        other = dist.TCPStore("127.0.0.1", port_of(held), is_master=False)
        store.set("word", "said")
        assert other.get("word") == b"said"
