"""Calls that make servers load a folder."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_transports.servers import Servers, wait_for_responses


def servers_that_verify(servers: Servers, engines: Sequence[EngineEndpoint]) -> list[EngineEndpoint]:
    """The engines that compare checksums before they load a folder, and can apply deltas: those that slime starts. Raises
    EngineError for one that has not responded, because it may be able to."""
    calls = servers.call_all(
        engines, lambda receiver: receiver.require_verifies(), what="whether it checks what it loads"
    )
    wait_for_responses(calls)
    return [engine for engine, call in zip(engines, calls, strict=True) if call.exception() is None]


def load_from_disk(
    servers: Servers, engines: Sequence[EngineEndpoint], folder: Path, version: int, *, compares: bool = False
) -> None:
    """Loads a folder on all engines at once, or makes them compare it with what they hold. Raises EngineError, when all calls
    have ended, if one has not done so."""
    try_to_load(servers, engines, folder, version, but=None, compares=compares)


def try_to_load(
    servers: Servers,
    engines: Sequence[EngineEndpoint],
    folder: Path,
    version: int,
    *,
    but: str | None,
    compares: bool = False,
) -> list[EngineEndpoint]:
    """Loads a folder on all engines at once. Returns those that refused it for the reason `but`. Raises EngineError for any
    other reason."""
    calls = servers.call_all(
        engines,
        lambda receiver: (receiver.compare_folder if compares else receiver.load_folder)(folder, version),
        what=f"version {version}",
    )
    wait(calls)
    errors = [(engine, call.exception()) for engine, call in zip(engines, calls, strict=True)]
    refused = [engine for engine, error in errors if but is not None and but in str(error)]
    failures = [error for engine, error in errors if error is not None and engine not in refused]
    if failures:
        raise EngineError("; ".join(str(error) for error in failures)) from failures[0]
    return refused
