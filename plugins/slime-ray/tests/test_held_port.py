"""A port that other processes get before one listens on it."""

import socket
import threading

import pytest

from slime_serving.held_port import held_port, number_of, place_of
from slime_training.rendezvous import SCHEME, meet


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_other_socket_gets_it(host):
    with held_port(host) as held, socket.socket(held.family) as other, pytest.raises(OSError, match="in use"):
        other.bind(("", number_of(held)))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_meet_there_while_it_is_held(host):
    with held_port(host) as held:
        url = f"{SCHEME}://{place_of(held)}?world_size=2&rank="
        others = []
        joining = threading.Thread(target=lambda: others.append(next(meet(f"{url}1"))[0]))
        joining.start()
        store, rank, world_size = next(meet(f"{url}0"))
        joining.join()
        assert (rank, world_size) == (0, 2)
        store.set("word", "said")
        assert others[0].get("word") == b"said"
