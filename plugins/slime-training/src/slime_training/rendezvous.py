"""Where processes meet: a TCPStore that listens on one address.

torch's own store listens on every interface, and requires no token. gloo listens at the address of the host's name,
which may be another machine's way in, or one that the others do not reach.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler

from slime_core.errors import TrainingError

SCHEME: Final = "one-address"
GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""torch's own environment variable."""


def listening_store(
    address: str,
    port: int = 0,
    *,
    world_size: int | None = None,
    wait_for_workers: bool = False,
    timeout: timedelta = default_pg_timeout,
) -> TCPStore:
    """The store of the process that others connect to, listening on this machine's `address` alone. `port`: 0 takes a free
    one. OSError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        master_listen_fd=listener.detach(),
    )


def on_one_address(url: str) -> str:
    """The `init_method` for torch's `tcp://HOST:PORT` whose first rank listens on HOST alone, which is an address of its
    machine; other init methods are returned as they are."""
    return SCHEME + url.removeprefix("tcp") if url.startswith("tcp://") else url


def meet(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's rendezvous for `SCHEME`. TrainingError if the first rank cannot listen on the address."""
    place = urlsplit(url)
    rank, world_size = (int(parse_qs(place.query)[name][0]) for name in ("rank", "world_size"))
    host, port = place.hostname, place.port
    assert host is not None
    assert port is not None
    if rank:
        store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    else:
        try:
            store = listening_store(host, port, world_size=world_size, wait_for_workers=True, timeout=timeout)
        except OSError as error:
            raise TrainingError(
                f"rank 0 of {world_size} cannot listen on {host}, port {port}, where the ranks meet: "
                f"{os.strerror(error.errno or 0)}. If that is no address of its machine, start Ray there with one "
                "(`ray start --node-ip-address ADDRESS`)."
            ) from error
    yield store, rank, world_size
    raise RuntimeError(f"{url}: ranks meet once.")


register_rendezvous_handler(SCHEME, meet)  # type: ignore[no-untyped-call]


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface to `host`; a loopback address for one. OSError if there is no route."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent.
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with this address; None if none has it."""
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if address in {own.address.partition("%")[0] for own in addresses}:
            return name
    return None


def listen_with_gloo_near(url: str) -> None:
    """Makes gloo's groups of this process, and of processes that it starts, listen on this machine's interface to the
    `tcp://HOST:PORT` alone, unless the environment names another. TrainingError if there is no route."""
    place = urlsplit(url)
    if place.scheme != "tcp" or place.hostname is None or GLOO_INTERFACE in os.environ:
        return
    try:
        address = address_towards(place.hostname, place.port or 0)
    except OSError as error:
        raise TrainingError(
            f"{url}, where the ranks meet: this machine has no route there: {error.strerror}."
        ) from error
    if (name := interface_of(address)) is not None:
        os.environ[GLOO_INTERFACE] = name
