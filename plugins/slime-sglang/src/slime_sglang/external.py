"""External servers: those that the run did not start."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection


def connect_external(config: SglangOptions, setup: EngineSetup, pool: aiohttp.ClientSession) -> list[SglangConnection]:
    """Connections to the servers of this engine, in order. Raises EngineError if there are too few."""
    first = setup.place * config.servers
    addresses = config.external_engine_addrs[first : first + config.servers]
    if len(addresses) < config.servers:
        raise EngineError(
            f"engine {setup.index}: engine.external_engine_addrs names {len(config.external_engine_addrs)} servers, but "
            f"{setup.place + 1} engines of {config.servers} need {first + config.servers}. Name more, or lower "
            "launcher.rollout_num_gpus."
        )
    token = None if config.external_engine_token_file is None else read_token(config.external_engine_token_file)
    return [
        SglangConnection(pool, address if "://" in address else f"http://{address}", token, f"engine {setup.index}")
        for address in (address.rstrip("/") for address in addresses)
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
