"""The command `slime-retrieval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_core.errors import ConfigError
from slime_serving.command import run_command
from slime_serving.listener import is_loopback, listen, shown
from slime_serving.token_file import token_from

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
        Path, typer.Option(help="File with the bearer token that requests must carry; created if it is missing.")
    ] = Path("slime-retrieval.token"),
    no_token: Annotated[bool, typer.Option("--no-token", help="Require no token.")] = False,
) -> None:
    """BM25 over a corpus: POST /retrieve {"queries": [...], "topk": 3}."""
    if no_token and not is_loopback(host):
        raise ConfigError(
            f"--no-token with --host {host}: all machines that reach this one could search. Leave it out."
        )

    from slime_search_r1.server.app import create_app
    from slime_search_r1.server.corpus import read_corpus
    from slime_search_r1.server.index import Index
    from slime_search_r1.server.serve import BACKLOG, server_of

    listener = listen(host, port, backlog=BACKLOG)
    token = None if no_token else token_from(token_file, create=True)
    index = Index(read_corpus(corpus))
    auth = "no token required" if no_token else f"token in {token_file}"
    print(
        f"slime-retrieval listens on {shown(listener, host)}, {len(index)} documents, {auth}",
        flush=True,
    )
    server_of(create_app(index, token)).run(sockets=[listener])


def main() -> None:
    run_command(app)
