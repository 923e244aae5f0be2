"""Whether engines hold, bit by bit, what the trainer sent: `check_weight_update_equal`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from slime_core.contracts.transport import EngineEndpoint
from slime_core.errors import EngineError
from slime_core.types.report import ComparedWith
from slime_sglang.server.checksum import ACTION
from slime_sglang.transports.flat import FlatBucket, checksum
from slime_sglang.transports.servers import Servers

CHECK: Final = "/weights_checker"
OWN_ACTION: Final = "checksum"
"""SGLang's own: of each rank's tensors as they are stored, comparable only between engines of one layout."""
LISTED: Final = 5


class Digests:
    """Checksums of the tensors of a push by name. An engine that computes in bfloat16 rounds what comes as float32, so
    both are noted."""

    def __init__(self) -> None:
        self._exact: dict[str, str] = {}
        self._rounded: dict[str, str] = {}

    def add(self, bucket: FlatBucket) -> None:
        for name, tensor in bucket.on_host().tensors():
            self._exact[name] = checksum(tensor)
            self._rounded[name] = (
                checksum(tensor.to(torch.bfloat16)) if tensor.dtype is torch.float32 else self._exact[name]
            )

    def differences(self, held: dict[str, str]) -> list[str]:
        """Names of tensors that are not in `held` as they were sent, and of those that were not sent."""
        sent = [name for name, digest in held.items() if digest in (self._exact.get(name), self._rounded.get(name))]
        # A head that is tied to the embedding may be sent, and is not held.
        missing = [name for name in self._exact if name not in held and name != "lm_head.weight"]
        return sorted({*held, *missing} - set(sent))


def require_equal(servers: Servers, engines: Sequence[EngineEndpoint], digests: Digests, version: int) -> ComparedWith:
    """EngineError naming the engine and the tensors. Where a server cannot name whole tensors (several ranks, quantised
    weights, latent attention, not started by slime) such servers are compared with one another by SGLang's own checksum: if all
    of them got the same wrong weights, nothing shows it. The answer says if that is how any was compared."""
    refused: list[tuple[EngineEndpoint, EngineError]] = []
    calls = servers.each(engines, CHECK, {"action": ACTION}, what=f"checking version {version}")
    for engine, call in zip(engines, calls, strict=True):
        try:
            answer = call.result()
        except EngineError as error:
            refused.append((engine, error))
            continue
        different = digests.differences(dict(answer["ranks"][0]["checksums"]))
        if different:
            more = f" and {len(different) - LISTED} more" if len(different) > LISTED else ""
            raise EngineError(
                f"engine {engine.index} ({engine.url}): after the push of version {version} it does not hold what the "
                f"trainer sent: {', '.join(different[:LISTED])}{more}."
            )
    if refused:
        compare(servers, [engine for engine, _ in refused], version, refused[0][1])
    return "engines" if refused else "trainer"


def compare(servers: Servers, engines: Sequence[EngineEndpoint], version: int, reason: EngineError) -> None:
    if len(engines) < 2:
        raise EngineError(
            f"sync.check_weight_update_equal: engine {engines[0].index} cannot name its tensors, and there is no second "
            "server like it to compare it with. Say --no-check-weight-update-equal; or have servers of one device, with plain "
            f"weights, that slime starts. It says: {reason}"
        )
    answers: list[Any] = servers.wait(
        servers.each(engines, CHECK, {"action": OWN_ACTION}, what=f"checking version {version}")
    )
    sums = [[rank["per_gpu_checksum"] for rank in answer["ranks"]] for answer in answers]
    for engine, own in zip(engines, sums, strict=True):
        if own != sums[0]:
            raise EngineError(
                f"engine {engine.index} ({engine.url}): after the push of version {version} its weights differ from "
                f"those of engine {engines[0].index}: checksums {own} and {sums[0]}."
            )
