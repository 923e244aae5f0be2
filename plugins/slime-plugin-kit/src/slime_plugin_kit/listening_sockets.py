"""Which addresses the processes of a run accept connections at."""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

PLUGIN: Final = """\
from slime_core.plugin import hook
from slime_plugin_kit.listening_sockets import write_sockets


@hook
def step_trained(event):
    write_sockets(event.run.run_dir / "listening.txt")
"""
"""A plugin file that writes, after every step, the sockets of the run's processes to listening.txt in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ListeningSocket:
    """A TCP socket that listens, or a UDP socket that receives from anyone."""

    address: str
    port: int
    pid: int
    process: str
    """Its name, such as `ray::TrainActor`, or its command line."""

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    def __str__(self) -> str:
        return f"{self.address} {self.port} {self.process} ({self.pid})"


def listening_sockets(root: int | None = None) -> list[ListeningSocket]:
    """Those of process `root` and all its descendants; None: of this process and its own."""
    process = psutil.Process(root)
    found = []
    for each in [process, *process.children(recursive=True)]:
        # It may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            name = " ".join(each.cmdline())[:100]
            found += [
                ListeningSocket(address=own.laddr.ip, port=own.laddr.port, pid=each.pid, process=name)
                for own in each.net_connections("inet")
                if own.laddr and not own.raddr and own.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
            ]
    return sorted(found)


def write_sockets(file: Path) -> None:
    file.write_text("".join(f"{own}\n" for own in listening_sockets()))


def beyond_loopback(file: Path) -> list[str]:
    """The lines of `write_sockets` whose socket other machines may reach."""
    return [
        line
        for line in file.read_text().splitlines()
        if not ListeningSocket(address=line.split()[0], port=0, pid=0, process="").is_loopback
    ]
