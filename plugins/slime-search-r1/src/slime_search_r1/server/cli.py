"""The command `slime-retrieval`."""

from __future__ import annotations

import ipaddress
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from slime_core.errors import ConfigError, SlimeError, StorageError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """A retrieval server for multi-turn search."""


@app.command()
def serve(
    corpus: Annotated[Path, typer.Option(help="JSON lines with title and text, or contents.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    token_file: Annotated[
        Path, typer.Option(help="File with the bearer token that callers must bring; made if it is not there.")
    ] = Path("slime-retrieval.token"),
    no_token: Annotated[bool, typer.Option("--no-token", help="Let everybody in who can reach the port.")] = False,
) -> None:
    """BM25 over a corpus: POST /retrieve {"queries": [...], "topk": 3}."""
    if no_token and not is_loopback(host):
        raise ConfigError(f"--no-token with --host {host}: whoever reaches this machine could search. Leave it out.")

    from slime_search_r1.server.app import create_app
    from slime_search_r1.server.corpus import read_corpus
    from slime_search_r1.server.index import Index
    from slime_search_r1.server.serve import listen, server_of

    listener = listen(host, port)
    token = None if no_token else token_from(token_file)
    index = Index(read_corpus(corpus))
    shown_host = f"[{host}]" if ":" in host else host
    told = "no token asked" if no_token else f"token in {token_file}"
    print(
        f"slime-retrieval listens on http://{shown_host}:{listener.getsockname()[1]}, {len(index)} documents, {told}",
        flush=True,
    )
    server_of(create_app(index, token)).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_from(file: Path) -> str:
    """The file's token. One that is made can be read by its owner alone."""
    try:
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(32) + "\n")
        token = file.read_text().strip()
    except OSError as error:
        raise StorageError(f"{file}: the token cannot be read or written: {error.strerror}") from None
    if not token:
        raise ConfigError(f"{file}: there is no token in it. Remove it to have one made.")
    return token


def main() -> None:
    """A SlimeError is one paragraph and its exit code."""
    try:
        app()
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
