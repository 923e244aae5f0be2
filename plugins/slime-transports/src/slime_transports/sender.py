"""ServerSender: the base class of the four senders."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeVar

import torch.distributed as dist

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup, SentReport, TensorExport, WeightSender
from slime_core.errors import EngineError, StorageError
from slime_core.registry.boundary import held
from slime_transports.config import SentConfig
from slime_transports.equality import Digests, EqualityCheck
from slime_transports.flattened_bucket import FlattenedBucket, flat_buckets, partner_of
from slime_transports.receiver import WeightReceiver
from slime_transports.servers import Servers, receiver_of

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")
Layers: TypeAlias = "Iterator[Mapping[str, Tensor] | None]"
"""An export: the tensors of each layer by name; None for a layer that another rank has."""

RANKS_WAIT: Final = timedelta(days=1)
"""Longer than any weight update: each call of the first rank has a time limit, but it makes several, and writes files,
while the others wait for it. If a rank dies, the wait ends at once, because its connections close."""
KINDS: Final = (EngineError, StorageError, RuntimeError)
"""Kinds of failures. After an EngineError the run replaces engines and sends the weights again; after the others it ends."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in the form that is sent to other ranks."""

    kind: type[Exception]
    """One of `KINDS`; the last one for all other errors."""
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
        return cls(kind, f"{type(error).__name__}: {error}" if kind is RuntimeError else str(error))


def gravest(failures: Sequence[Failure]) -> Failure:
    """The failure to raise: failures that replacing engines does not fix come first; among equal kinds, the first rank's."""
    return max(failures, key=lambda failure: KINDS.index(failure.kind))


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version and the engines that get it."""

    version: int
    engines: Sequence[EngineEndpoint]
    digests: Digests | None = None
    """None: the engines are not compared with the trainer by digests."""
    compares: bool = False
    """The engines have the version already, and compare it with what they hold."""

    async def begin(self, receiver: WeightReceiver) -> None:
        """Call it on each server before the first bucket."""
        await (receiver.begin_comparison() if self.compares else receiver.begin())

    def digest(self, bucket: FlattenedBucket) -> None:
        """Adds a bucket to the comparison. Call it once with every bucket that is sent."""
        if self.digests is not None:
            self.digests.add(bucket)


class ServerSender(WeightSender):
    """`send` exports once, and once more for servers that compare what they hold with a second copy (`compares_sent`). After
    any failure the export is still exhausted, because other ranks wait in its gathers. At the end a failure on one rank is
    raised on all ranks.

    Frozen tensors are sent to an engine once, unless all tensors are compared.

    No call flushes a cache: with waiting requests SGLang would crash. Engines flush in `commit_weights`.
    """

    skips_frozen: ClassVar[bool] = True

    def __init__(self, config: SentConfig) -> None:
        self._config = config
        self._place: SenderSetup | None = None
        self._servers: Servers | None = None
        self._ranks: dist.ProcessGroup | None = None
        self._complete: set[tuple[EngineEndpoint, int]] = set()
        """Engines that have the frozen tensors, with `EngineEndpoint.dropped`."""

    def setup(self, setup: SenderSetup) -> None:
        self._place = setup
        self._servers = Servers(self._config.update_weights_timeout)
        if setup.world_size > 1:
            # Ranks that fail early wait in this group for those that still send.
            self._ranks = dist.new_group(backend="gloo", timeout=RANKS_WAIT)

    @property
    def all_ranks(self) -> bool:
        """Whether every rank needs whole tensors, not only the first."""
        return False

    @property
    def place(self) -> SenderSetup:
        assert self._place is not None
        return self._place

    @property
    def servers(self) -> Servers:
        assert self._servers is not None
        return self._servers

    def send(self, export: TensorExport, version: int, engines: Sequence[EngineEndpoint]) -> SentReport:
        checks = self._config.check_weight_update_equal
        again = [engine for engine in engines if checks and receiver_of(engine).compares_sent]
        partial = self.skips_frozen and all(receiver_of(engine).loads_parts for engine in engines)
        held = {(engine, engine.dropped) for engine in engines}
        known = partial and not checks and self._complete >= held
        self._complete, complete = set(), self._complete
        report, check = SentReport(), None
        with self.failing_together():
            with exhausted(export(all_ranks=self.all_ranks)) as layers:
                if checks and self.place.rank == 0 and len(again) < len(engines):
                    check = EqualityCheck(self.servers, [engine for engine in engines if engine not in again], version)
                update = WeightUpdate(version, engines, None if check is None else check.digests)
                report = self.send_version(self._without_frozen(layers) if known else layers, update)
            if check is not None:
                report = replace(report, compared_with=check.require_equal())
        if again:
            with self.failing_together(), exhausted(export(all_ranks=self.all_ranks)) as layers:
                self.send_version(layers, WeightUpdate(version, again, compares=True))
            if self.place.rank == 0:
                report = replace(report, compared_with=report.compared_with or "trainer")
        others = {one for one in complete if one[0] not in engines and not replaced(one[0], engines)}
        self._complete = others | held
        return report

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raises an error of one rank on all ranks, with the same kind, because any rank's error may be reported first."""
        with held() as failed:
            yield
        # Raised below, or a graver one.
        own = failed.error
        by_rank = self.all_gather(None if own is None else Failure.of(own))
        failures = [failure for failure in by_rank if failure is not None]
        if not failures:
            return
        found = gravest(failures)
        if own is not None and Failure.of(own).kind is found.kind:
            raise own
        raise found.kind(f"another trainer rank could not send weights: {found.text}") from own

    def all_gather(self, own: T) -> list[T]:
        """Returns every rank's `own`, by rank."""
        if self._ranks is None:
            return [own]
        responses: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(responses, own, group=self._ranks)
        return responses

    def _without_frozen(self, layers: Layers) -> Layers:
        """The layers without frozen tensors, which with adapters are most of a model. Keeps tensors whose partner, without
        which SGLang does not load them, is not frozen."""
        frozen = self.place.frozen
        for layer in layers:
            yield layer and {
                name: tensor
                for name, tensor in layer.items()
                if name not in frozen or partner_of(name) not in {None, *frozen}
            }

    @abstractmethod
    def send_version(self, layers: Layers, update: WeightUpdate) -> SentReport:
        """Sends the weights to every engine of the update."""

    def buckets(self, layers: Layers) -> Iterator[FlattenedBucket]:
        """Buckets of the layers that this rank has."""
        found = flat_buckets(layers, self._config.update_weight_buffer_size)
        return (bucket for bucket in found if bucket is not None)

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close()
            self._servers = None


@contextlib.contextmanager
def exhausted(export: Layers) -> Iterator[Layers]:
    """Yields an export, and reads what is left of it."""
    layers = iter(export)
    try:
        yield layers
    finally:
        for _ in layers:
            pass


def replaced(engine: EngineEndpoint, engines: Sequence[EngineEndpoint]) -> bool:
    """Whether `engines` has another incarnation of `engine`."""
    return any(other.index == engine.index and other.incarnation != engine.incarnation for other in engines)


def bucket_name(bucket: FlattenedBucket, version: int) -> str:
    return f"bucket {bucket.index} of version {version} ({bucket.names[0]} ...)"
