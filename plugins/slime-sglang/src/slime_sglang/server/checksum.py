"""Checksums of the weights that a server holds, under the names of the model's files."""

from __future__ import annotations

from typing import Any, Final

import xxhash

from slime_sglang.server.param_shards import parts_of, skipped
from slime_sglang.server.shard_actions import DIGESTS, REFUSED, SKIPPED

ACTION: Final = "slime_checksum"
"""Action of /weights_checker."""


def checksum_of_weights(model: Any) -> tuple[str, dict[str, str]]:
    """Returns xxh3-64 (hex) over all weights in the order of their Hugging Face names, without names or lengths, and the
    digest of each. For a server with one rank.

    A tensor that is held twice counts once. If its copies differ, both count, and no other model has that checksum.
    """
    from slime_transports.flattened_bucket import bytes_of

    whole = xxhash.xxh3_64()
    by_name: dict[str, str] = {}
    for part in sorted(parts_of(model), key=lambda part: part.name):
        data = bytes_of(part.tensor)
        digest = xxhash.xxh3_64_hexdigest(data)
        if by_name.get(part.name) == digest:
            continue
        whole.update(data)
        add(by_name, part.name, digest)
    return whole.hexdigest(), by_name


def places_of_weights(model: Any, action: str, *, ranks: int) -> dict[str, str]:
    """The response of one rank to `PARTS` or `DIGESTS`: digests by place. `ranks`: number of ranks of the server. An error is
    returned under `REFUSED` and not raised, because the other ranks wait for this response."""
    from slime_transports.flattened_bucket import checksums

    found: dict[str, str] = {}
    try:
        parts = list(parts_of(model, ranks=ranks))
        if action == DIGESTS:
            for part, digest in zip(parts, checksums([part.tensor for part in parts]), strict=True):
                add(found, str(part.place), digest)
        else:
            found |= {str(part.place): "" for part in parts}
    except (NotImplementedError, RuntimeError) as error:
        return {REFUSED: f"{type(error).__name__}: {error}"}
    return found | {SKIPPED: " ".join(skipped(model.config))}


def add(digests: dict[str, str], key: str, digest: str) -> None:
    """Adds a digest. Copies of a tensor that differ get a digest that no other model can have."""
    held = digests.get(key, digest)
    digests[key] = digest if held == digest else f"{held} and {digest}"
