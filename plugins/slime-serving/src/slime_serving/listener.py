"""Listening sockets and loopback addresses."""

from __future__ import annotations

import ipaddress
import socket

from slime_core.errors import ConfigError


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """A listening socket, which child processes do not inherit. Raises ConfigError if the port is in use or the address is
    not this machine's. `port`: 0 takes any free port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror}. Pass --port 0 for any free port."
        ) from None
    listener.listen(backlog)
    return listener


def shown(listener: socket.socket, host: str) -> str:
    """The URL of `listener`, to print."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
