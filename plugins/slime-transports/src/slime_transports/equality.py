"""EqualityCheck: whether engines hold exactly the bits that the trainer sent (`check_weight_update_equal`).

Before a weight update, servers report which parts of which tensors each of their ranks holds. The sender computes digests
of those parts while it sends the tensors, and afterwards the servers compute digests of the parts that they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_core.types.report import ComparedWith
from slime_transports.flattened_bucket import FlattenedBucket, checksums
from slime_transports.places import Place
from slime_transports.server_shards import ServerShards
from slime_transports.servers import Servers, wait_for_responses

TIED: Final = "lm_head.weight"
"""A head that is tied to the embedding may be sent, but servers do not hold it."""
LISTED: Final = 5


class Digests:
    """Digests of the parts that servers hold, computed from the tensors of a weight update in the servers' dtypes. Nothing is
    read if `held` is empty."""

    def __init__(self, held: Iterable[ServerShards]) -> None:
        self._places: dict[str, set[Place]] = defaultdict(set)
        for server in held:
            for places in server.ranks.values():
                for place in places:
                    self._places[place.name].add(place)
        self._sent: dict[str, tuple[int, ...]] = {}
        """Shapes by name."""
        self._digests: dict[Place, str] = {}

    def add(self, bucket: FlattenedBucket) -> None:
        if not self._places:
            return
        parts: dict[Place, Tensor] = {}
        for name, tensor in bucket.tensors():
            whole = tensor if tensor.dim() else tensor.view(1)
            self._sent[name] = tuple(whole.shape)
            for place in self._places.get(name, ()):
                if place.dim < whole.dim() and place.start + place.length <= whole.shape[place.dim]:
                    parts[place] = part(whole, place)
        self._digests.update(zip(parts, checksums(list(parts.values())), strict=True))

    def differences(self, held: ServerShards) -> list[str]:
        """Names of tensors that differ from those sent on some rank, or of which no rank holds some part. A name is followed
        by the part if a rank holds only a part, and by the rank if there are several."""
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
    """Whether `places` together cover a tensor of this shape."""
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
    """The check of one weight update: create it before, add every bucket to `digests`, and call `require_equal` after it.
    Compares each rank with what the trainer sent. Servers that cannot name their parts (quantized weights, external) are only
    compared with one another by their program's own checksum, which does not detect that all of them got the same wrong
    weights. Servers with pipeline stages are refused: only the first stage responds."""

    def __init__(self, servers: Servers, engines: Sequence[EngineEndpoint], version: int) -> None:
        self._servers, self._version = servers, version
        self._able: list[EngineEndpoint] = []
        self._unable: list[EngineEndpoint] = []
        self._reasons: list[EngineError] = []
        held: list[ServerShards] = []
        for engine, given in zip(engines, parts_held(servers, engines, version, digests=False), strict=True):
            if isinstance(given, EngineError):
                self._unable.append(engine)
                self._reasons.append(given)
            else:
                self._able.append(engine)
                held.append(given)
        self.digests = Digests(held)

    def require_equal(self) -> ComparedWith:
        """Raises EngineError with the engine and the tensors that differ. Returns "trainer", or "engines" if some server was
        only compared with others."""
        for engine, held in zip(
            self._able, parts_held(self._servers, self._able, self._version, digests=True), strict=True
        ):
            if isinstance(held, EngineError):
                raise held
            different = self.digests.differences(held)
            if different:
                more = f" and {len(different) - LISTED} more" if len(different) > LISTED else ""
                raise EngineError(
                    f"engine {engine.index} ({engine.url}): after the update to version {self._version} it does not hold what "
                    f"the trainer sent: {', '.join(different[:LISTED])}{more}."
                )
        if self._unable:
            compare(self._servers, self._unable, self._version, self._reasons[0])
        return "engines" if self._unable else "trainer"


def parts_held(
    servers: Servers, engines: Sequence[EngineEndpoint], version: int, *, digests: bool
) -> list[ServerShards | EngineError]:
    """The shards of each server, or the error of one that cannot report them. Raises EngineError if a server has not
    responded, because it may be able to."""
    calls = servers.call_all(
        engines, lambda receiver: receiver.shards(digests=digests), what=f"checking version {version}"
    )
    found: list[ServerShards | EngineError] = []
    wait_for_responses(calls)
    for call in calls:
        try:
            found.append(call.result())
        except EngineError as error:
            found.append(error)
    return found


def compare(servers: Servers, engines: Sequence[EngineEndpoint], version: int, reason: EngineError) -> None:
    if len(engines) < 2:
        raise EngineError(
            f"sync.check_weight_update_equal: engine {engines[0].index} cannot name its tensors, and there is no second "
            "server like it to compare it with. Pass --no-check-weight-update-equal, or use servers that slime starts, with "
            f"unquantized weights. It responded: {reason}"
        )
    responses: list[tuple[list[str], int]] = servers.wait(
        servers.call_all(engines, lambda receiver: receiver.own_checksums(), what=f"checking version {version}")
    )
    for engine, (_, stages) in zip(engines, responses, strict=True):
        if stages > 1:
            raise EngineError(
                f"sync.check_weight_update_equal: engine {engine.index} ({engine.url}) has {stages} pipeline stages, and only "
                "the first one responds: the weights of the others would not be compared. Pass "
                "--no-check-weight-update-equal, or use servers with one stage."
            )
    sums = [own for own, _ in responses]
    for engine, own in zip(engines, sums, strict=True):
        if own != sums[0]:
            raise EngineError(
                f"engine {engine.index} ({engine.url}): after the update to version {version} its weights differ from "
                f"those of engine {engines[0].index}: checksums {own} and {sums[0]}."
            )
