"""ServerShards: the parts of tensors that servers report to hold, by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_sglang.server.places import DIGESTS, OF_DRAFTS, PARTS, REFUSED, SKIPPED, Place
from slime_sglang.transports.servers import Servers, wait_for_responses

CHECK: Final = "/weights_checker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShards:
    """The parts that a server holds, without the draft of speculative decoding."""

    ranks: Mapping[int, Mapping[Place, str]]
    """Digests by place, for every rank; empty if only places were requested."""
    skipped: tuple[str, ...] = ()
    """Prefixes of names that the model does not load."""


def parts_held(
    servers: Servers, engines: Sequence[EngineEndpoint], version: int, *, digests: bool
) -> list[ServerShards | EngineError]:
    """The shards of each server, or the error of one that cannot report them. Raises EngineError if a server has not
    responded, because it may be able to."""
    action = DIGESTS if digests else PARTS
    calls = servers.call_all(engines, CHECK, {"action": action}, what=f"checking version {version}")
    found: list[ServerShards | EngineError] = []
    wait_for_responses(calls)
    for engine, call in zip(engines, calls, strict=True):
        try:
            found.append(read(engine, call.result()))
        except EngineError as error:
            found.append(error)
    return found


def read(engine: EngineEndpoint, response: Any) -> ServerShards:
    """Parses a response. Raises EngineError if a rank refuses or is missing."""
    ranks: dict[int, Mapping[Place, str]] = {}
    skipped: tuple[str, ...] = ()
    for given in response["ranks"]:
        checksums: dict[str, str] = dict(given["checksums"])
        rank = int(given["parallelism_info"]["rank"])
        if REFUSED in checksums:
            raise EngineError(f"engine {engine.index} ({engine.url}), rank {rank}: {checksums[REFUSED]}")
        skipped = tuple(checksums.pop(SKIPPED, "").split())
        # With data-parallel attention every group of ranks responds for all ranks.
        ranks[rank] = {Place.parse(key): digest for key, digest in checksums.items() if not key.startswith(OF_DRAFTS)}
    size = int(response["ranks"][0]["parallelism_info"]["size"])
    if sorted(ranks) != list(range(size)):
        raise EngineError(
            f"engine {engine.index} ({engine.url}): of its {size} ranks only {sorted(ranks)} report the weights they hold."
        )
    return ServerShards(ranks=ranks, skipped=skipped)
