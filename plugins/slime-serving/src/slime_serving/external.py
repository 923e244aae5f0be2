"""External servers: those that the run did not start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.connection import Connection

C = TypeVar("C", bound=Connection)


def connect_external(
    kind: type[C],
    addresses: Sequence[str],
    setup: EngineSetup,
    pool: aiohttp.ClientSession,
    *,
    servers: int,
    token_file: str | None,
) -> list[C]:
    """Connections to the servers of this engine, in order: `servers` of `engine.external_engine_addrs` for each engine. Raises
    EngineError if there are too few."""
    first = setup.place * servers
    own = addresses[first : first + servers]
    if len(own) < servers:
        raise EngineError(
            f"engine {setup.index}: engine.external_engine_addrs names {len(addresses)} servers, but "
            f"{setup.place + 1} engines of {servers} need {first + servers}. Name more, or lower "
            "launcher.rollout_num_gpus."
        )
    token = None if token_file is None else read_token(token_file)
    return [
        kind(pool, address if "://" in address else f"http://{address}", token, f"engine {setup.index}")
        for address in (address.rstrip("/") for address in own)
    ]


def read_token(path: str) -> str:
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"engine.external_engine_token_file = {path}: cannot be read: {error}.") from error
    if not token or len(token.split()) != 1:
        raise EngineError(
            f"engine.external_engine_token_file = {path}: the file must contain one token and nothing else."
        )
    return token
