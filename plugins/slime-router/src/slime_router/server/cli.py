"""The command `slime-router`."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from slime_core import groups
from slime_core.config.binder import Binder
from slime_core.config.part import BoundPlugin
from slime_core.config.plugin_table import PluginTable
from slime_core.errors import ConfigError
from slime_core.registry import Registry
from slime_router.server.settings import ProgramName
from slime_serving.command import run_command
from slime_serving.listener import is_loopback, listen, shown
from slime_serving.token_file import token_from

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def serve(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of an engine or of sglang-router; may be given several times, or later by /workers."
        ),
    ] = None,
    middleware: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a middleware, or a TOML table with its options, such as "
            "'{ name = \"retry\", attempts = 5 }'; outermost first."
        ),
    ] = None,
    program: Annotated[ProgramName, typer.Option(help="What the upstreams are.")] = ProgramName.SGLANG,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 30000,
    token_file: Annotated[
        Path, typer.Option(help="File with the bearer token that callers must send; created if it does not exist.")
    ] = Path("slime-router.token"),
    no_token: Annotated[bool, typer.Option("--no-token", help="Serve all callers that reach the port.")] = False,
    upstream_token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that the upstreams require.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one request as a whole.", min=0.001)] = 14400.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds for connecting to an upstream.", min=0.001)] = 30.0,
    health_interval: Annotated[float, typer.Option(help="Seconds between probes of an upstream.", min=0.01)] = 5.0,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests served at a time; others get status 503.", min=1)
    ] = 10_000,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Middlewares in front of engines of SGLang or vLLM, or of sglang-router."""
    parts = bind_middlewares(middleware or [])
    check(log_level, no_token=no_token, host=host)
    from slime_router.server.app import RouterApp
    from slime_router.server.serve import BACKLOG, run
    from slime_router.server.settings import Settings
    from slime_router.server.upstreams import Upstreams

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    settings = Settings(
        timeout_s=timeout,
        connect_timeout_s=connect_timeout,
        health_interval_s=health_interval,
        max_in_flight=max_in_flight,
        program=program,
        token=None if no_token else token_from(token_file, create=True),
        upstream_token=None if upstream_token_file is None else token_from(upstream_token_file, create=False),
    )
    asgi = RouterApp(Upstreams(upstream or [], settings), parts, settings).asgi()
    socket = listen(host, port, backlog=BACKLOG)
    token = "no token required" if no_token else f"token in {token_file}"
    print(f"slime-router listens on {shown(socket, host)}, {token}", flush=True)
    run(asgi, socket, log_level=log_level)


def check(log_level: str, *, no_token: bool, host: str) -> None:
    """Raises ConfigError for options that exclude each other."""
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f'--log-level "{log_level}": unknown level. Pass one of debug, info, warning, error.')
    if no_token and not is_loopback(host):
        raise ConfigError(
            f"--no-token with --host {host}: all callers that reach this machine could use the engines. Omit --no-token."
        )


def bind_middlewares(texts: list[str]) -> tuple[BoundPlugin, ...]:
    """The middlewares of `texts` (names or TOML tables), outermost first. Raises one ConfigError with all problems."""
    binder = Binder(Registry.from_environment(), Path.cwd(), [])
    tables = []
    for text in texts:
        try:
            tables.append(PluginTable.model_validate(table_of(text)))
        except (tomllib.TOMLDecodeError, ValidationError):
            binder.problems.append(
                f"--middleware '{text}': must be a name, or a TOML table such as {{ name = \"retry\", attempts = 5 }}."
            )
    parts = binder.parts(groups.MIDDLEWARES, tables, "--middleware")
    if binder.problems:
        raise ConfigError(binder.problems)
    return parts


def table_of(text: str) -> Any:
    return tomllib.loads(f"table = {text}")["table"] if text.lstrip().startswith("{") else text


def main() -> None:
    run_command(app)
