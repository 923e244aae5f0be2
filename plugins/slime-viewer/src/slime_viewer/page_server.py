"""The server of the page, on loopback."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import typer
import uvicorn

from slime_core.errors import ConfigError
from slime_core.registry import Registry
from slime_viewer.app import make_app
from slime_viewer.panel import installed_panels
from slime_viewer.replies import Page
from slime_viewer.run_list import RunList

HOST: Final = "127.0.0.1"
TOKEN_BYTES: Final = 24


class AnnouncingServer(uvicorn.Server):
    """Calls a function when it accepts requests."""

    def __init__(self, config: uvicorn.Config, address: str, *, browser: bool) -> None:
        super().__init__(config)
        self._address = address
        self._browser = browser

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        typer.echo(f"{self._address}\nCtrl-C ends it.")
        if self._browser:
            # A text browser would hold the terminal until it is left.
            threading.Thread(target=webbrowser.open, args=(self._address,), daemon=True).start()


@contextmanager
def open_page(folders: Sequence[Path], hf_checkpoint: Path | None = None) -> Iterator[Page]:
    """ConfigError for a folder that is not there, PluginError for a panel that cannot be used."""
    page = Page(RunList(folders, hf_checkpoint=hf_checkpoint), installed_panels(Registry.from_environment()))
    try:
        yield page
    finally:
        page.runs.close()


def serve_page(page: Page, *, port: int, browser: bool) -> None:
    """Until Ctrl-C. `port` 0: a free one. ConfigError if it is taken."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}. Without --port a free one is taken.") from error
        address = f"http://{HOST}:{listener.getsockname()[1]}/#token={token}"
        config = uvicorn.Config(make_app(page, token), access_log=False, log_level="warning", lifespan="off")
        server = AnnouncingServer(config, address, browser=browser)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return
