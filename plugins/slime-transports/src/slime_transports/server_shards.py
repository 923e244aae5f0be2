"""ServerShards: the parts of tensors that a server holds, by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_transports.places import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShards:
    """The parts that a server holds, without the draft of speculative decoding."""

    ranks: Mapping[int, Mapping[Place, str]]
    """Digests by place, for every rank; empty if only places were requested."""
    skipped: tuple[str, ...] = ()
    """Prefixes of names that the model does not load."""
