"""Whether engines hold, bit by bit, what the trainer sent: `check_weight_update_equal`.

Before a push servers tell which parts of which tensors each of their ranks holds. The sender digests those parts of each
tensor while it passes, and afterwards the servers digest what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_core.types.report import ComparedWith
from slime_sglang.server.places import Place
from slime_sglang.transports.flat import FlatBucket, checksums
from slime_sglang.transports.held import CHECK, HeldParts, parts_held
from slime_sglang.transports.servers import Servers

OWN_ACTION: Final = "checksum"
"""SGLang's own: of each rank's tensors as they are stored, comparable only between engines of one layout."""
TIED: Final = "lm_head.weight"
"""A head that is tied to the embedding may be sent, and is not held."""
LISTED: Final = 5


class Digests:
    """Checksums of those parts of the tensors of a push that servers hold, in the types that they hold them in. Empty `held`:
    nothing is read."""

    def __init__(self, held: Iterable[HeldParts]) -> None:
        self._wanted: dict[str, set[Place]] = defaultdict(set)
        for server in held:
            for places in server.ranks.values():
                for place in places:
                    self._wanted[place.name].add(place)
        self._sent: dict[str, tuple[int, ...]] = {}
        """Shapes by name."""
        self._digests: dict[Place, str] = {}

    def add(self, bucket: FlatBucket) -> None:
        if not self._wanted:
            return
        parts: dict[Place, Tensor] = {}
        for name, tensor in bucket.tensors():
            whole = tensor if tensor.dim() else tensor.view(1)
            self._sent[name] = tuple(whole.shape)
            for place in self._wanted.get(name, ()):
                if place.dim < whole.dim() and place.start + place.length <= whole.shape[place.dim]:
                    parts[place] = part(whole, place)
        self._digests.update(zip(parts, checksums(list(parts.values())), strict=True))

    def differences(self, held: HeldParts) -> list[str]:
        """Names of tensors of which a rank holds something else than was sent, or of which no rank holds some part: with the
        part where a rank has not the whole of it, and the rank where there are several."""
        several = len(held.ranks) > 1
        wrong = {
            self._described(place) + (f" of rank {rank}" if several else "")
            for rank, places in held.ranks.items()
            for place, digest in places.items()
            if digest != self._digests.get(place)
        }
        places_by_name: dict[str, list[Place]] = defaultdict(list)
        for places in held.ranks.values():
            for place in places:
                places_by_name[place.name].append(place)
        for name, shape in self._sent.items():
            missing = not covers(places_by_name.get(name, ()), shape)
            if missing and not (name == TIED and name not in places_by_name) and not name.startswith(held.skipped):
                wrong.add(f"{name} (not held whole)" if name in places_by_name else f"{name} (not held)")
        return sorted(wrong)

    def _described(self, place: Place) -> str:
        shape = self._sent.get(place.name)
        if shape is None:
            return f"{place.name} (not sent)"
        if shape[place.dim : place.dim + 1] == (place.length,):
            return place.name
        return f"{place.name} ({place.start} to {place.start + place.length} of dimension {place.dim})"


def part(whole: Tensor, place: Place) -> Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    return whole.narrow(place.dim, place.start, place.length).to(dtype)


def covers(places: Iterable[Place], shape: Sequence[int]) -> bool:
    """Whether these are together all of a tensor of this shape."""
    for dim, size in enumerate(shape):
        end = 0
        for place in sorted((place for place in places if place.dim == dim), key=lambda place: place.start):
            if place.start > end:
                break
            end = max(end, place.start + place.length)
        if end >= size:
            return True
    return False


class EqualityCheck:
    """Of one push: made before it, given every bucket, asked afterwards. A rank-by-rank comparison with what the trainer
    sent; servers that cannot name their parts (quantised weights, several pipeline stages, not started by slime) are
    compared with one another by SGLang's own checksum: if all of them got the same wrong weights, nothing shows it."""

    def __init__(self, servers: Servers, engines: Sequence[EngineEndpoint], version: int) -> None:
        self._servers, self._version = servers, version
        self._able: list[EngineEndpoint] = []
        self._unable: list[EngineEndpoint] = []
        self._reasons: list[EngineError] = []
        held: list[HeldParts] = []
        for engine, said in zip(engines, parts_held(servers, engines, version, digests=False), strict=True):
            if isinstance(said, EngineError):
                self._unable.append(engine)
                self._reasons.append(said)
            else:
                self._able.append(engine)
                held.append(said)
        self.digests = Digests(held)

    def require_equal(self) -> ComparedWith:
        """EngineError naming the engine and the tensors. "engines": some server was only compared with others."""
        for engine, held in zip(
            self._able, parts_held(self._servers, self._able, self._version, digests=True), strict=True
        ):
            if isinstance(held, EngineError):
                raise held
            different = self.digests.differences(held)
            if different:
                more = f" and {len(different) - LISTED} more" if len(different) > LISTED else ""
                raise EngineError(
                    f"engine {engine.index} ({engine.url}): after the push of version {self._version} it does not hold what "
                    f"the trainer sent: {', '.join(different[:LISTED])}{more}."
                )
        if self._unable:
            compare(self._servers, self._unable, self._version, self._reasons[0])
        return "engines" if self._unable else "trainer"


def compare(servers: Servers, engines: Sequence[EngineEndpoint], version: int, reason: EngineError) -> None:
    if len(engines) < 2:
        raise EngineError(
            f"sync.check_weight_update_equal: engine {engines[0].index} cannot name its tensors, and there is no second "
            "server like it to compare it with. Say --no-check-weight-update-equal; or have servers that slime starts, without "
            f"pipeline stages and with plain weights. It says: {reason}"
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
