"""What servers say they hold: places of tensors, by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_sglang.server.places import DIGESTS, OF_DRAFTS, PARTS, REFUSED, SKIPPED, Place
from slime_sglang.transports.servers import Servers, wait_for_answers

CHECK: Final = "/weights_checker"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParts:
    """By a server. The draft of speculative decoding is left out."""

    ranks: Mapping[int, Mapping[Place, str]]
    """Digests by place, of every rank; empty where only places were asked for."""
    skipped: tuple[str, ...] = ()
    """What names begin with whose tensors the model does not load."""


def parts_held(
    servers: Servers, engines: Sequence[EngineEndpoint], version: int, *, digests: bool
) -> list[HeldParts | EngineError]:
    """Of each server, or why it cannot say. EngineError for one that has not answered: it may be able to."""
    action = DIGESTS if digests else PARTS
    calls = servers.each(engines, CHECK, {"action": action}, what=f"checking version {version}")
    found: list[HeldParts | EngineError] = []
    wait_for_answers(calls)
    for engine, call in zip(engines, calls, strict=True):
        try:
            found.append(read(engine, call.result()))
        except EngineError as error:
            found.append(error)
    return found


def read(engine: EngineEndpoint, answer: Any) -> HeldParts:
    """EngineError if a rank refuses, or is not among the answers."""
    ranks: dict[int, Mapping[Place, str]] = {}
    skipped: tuple[str, ...] = ()
    for said in answer["ranks"]:
        checksums: dict[str, str] = dict(said["checksums"])
        rank = int(said["parallelism_info"]["rank"])
        if REFUSED in checksums:
            raise EngineError(f"engine {engine.index} ({engine.url}), rank {rank}: {checksums[REFUSED]}")
        skipped = tuple(checksums.pop(SKIPPED, "").split())
        # Under data-parallel attention every group of ranks answers for all.
        ranks[rank] = {Place.parse(key): digest for key, digest in checksums.items() if not key.startswith(OF_DRAFTS)}
    size = int(answer["ranks"][0]["parallelism_info"]["size"])
    if sorted(ranks) != list(range(size)):
        raise EngineError(
            f"engine {engine.index} ({engine.url}): of its {size} ranks only {sorted(ranks)} say what they hold."
        )
    return HeldParts(ranks=ranks, skipped=skipped)
