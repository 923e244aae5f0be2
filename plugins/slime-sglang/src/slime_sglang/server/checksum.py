"""Checksums of the weights that a server holds, under the names of the model's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import xxhash

from slime_sglang.server.parts import parts_of, skipped
from slime_sglang.server.places import DIGESTS, REFUSED, SKIPPED

if TYPE_CHECKING:
    from torch import Tensor

ACTION: Final = "slime_checksum"
"""Of /weights_checker."""


def checksum_of_weights(model: Any) -> tuple[str, dict[str, str]]:
    """xxh3-64 (hex) over all weights in the order of their Hugging Face names, without names or lengths; and of each. Of
    a server of one rank.

    What is held twice counts once, but for a copy that holds something else: the checksum is then nobody else's.
    """
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
    """What `PARTS` or `DIGESTS` is answered by a rank of a server that has `ranks` of them: digests by place. What a rank
    does not know it says: the others wait for its answer."""
    found: dict[str, str] = {}
    try:
        for part in parts_of(model, ranks=ranks):
            if action == DIGESTS:
                add(found, str(part.place), xxhash.xxh3_64_hexdigest(bytes_of(part.tensor)))
            else:
                found[str(part.place)] = ""
    except (NotImplementedError, RuntimeError) as error:
        return {REFUSED: f"{type(error).__name__}: {error}"}
    return found | {SKIPPED: " ".join(skipped(model.config))}


def add(digests: dict[str, str], key: str, digest: str) -> None:
    """What is held twice and not alike has no digest that anybody else could have."""
    held = digests.get(key, digest)
    digests[key] = digest if held == digest else f"{held} and {digest}"


def bytes_of(tensor: Tensor) -> memoryview:
    import torch

    data: memoryview = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
    return data
