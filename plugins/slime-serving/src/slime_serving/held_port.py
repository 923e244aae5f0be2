"""A port that no other process gets until a server listens on it."""

from __future__ import annotations

import socket


def held_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket on a free TCP port of this machine's address `host`. While it is open, the system assigns the port to no other
    socket, and a server or store can still listen on it: it sets SO_REUSEADDR too, and this socket does not listen. Servers
    listen, and ranks connect, seconds after the port was chosen; a port that was released meanwhile may be in use by another
    connection."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def number_of(held: socket.socket) -> int:
    number: int = held.getsockname()[1]
    return number


def place_of(held: socket.socket) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    host, port = held.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
