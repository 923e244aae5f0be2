"""serve: runs the app until the process gets a signal to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import uvicorn

from slime_core.registry import Registry
from slime_tinker.app import asgi
from slime_tinker.keys import Keys
from slime_tinker.models import Models
from slime_tinker.service import running
from slime_tinker.settings import Settings, Tls

BACKLOG: Final = 4096
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that clients close them first."""
GRACE_S: Final = 1
"""For responses that are on their way when the server ends; fetches that wait are sent again by their clients."""


class Server(uvicorn.Server):
    """uvicorn's raises a signal again when it has ended, and SIGTERM then ends the process: nothing would be saved, and
    external engines would keep the adapters."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup has SIGHUP ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig != signal.SIGHUP:
            os._exit(128 + sig)
        self.should_exit = True


def serve(
    models: Models,
    settings: Settings,
    registry: Registry,
    *,
    listener: socket.socket,
    keys: Callable[[], Keys] | None,
    tls: Tls | None,
    ready: Callable[[], object],
) -> None:
    """Until SIGINT, SIGTERM or SIGHUP; a second one ends the process at once. `ready`: called when requests are served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A client that waits for a thousand results has a thousand connections.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(until_ended(models, settings, registry, listener=listener, keys=keys, tls=tls, ready=ready))


async def until_ended(
    models: Models,
    settings: Settings,
    registry: Registry,
    *,
    listener: socket.socket,
    keys: Callable[[], Keys] | None,
    tls: Tls | None,
    ready: Callable[[], object],
) -> None:
    async with running(models, settings, registry) as service:
        config = uvicorn.Config(
            asgi(service, keys),
            access_log=False,
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=None if tls is None else str(tls.certificate),
            ssl_keyfile=None if tls is None else str(tls.key),
        )
        ready()
        await Server(config).serve(sockets=[listener])
