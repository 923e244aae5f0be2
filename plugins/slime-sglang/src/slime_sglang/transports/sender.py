"""What the four senders have in common."""

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
from slime_sglang.transports.config import SentConfig
from slime_sglang.transports.equality import Digests, EqualityCheck
from slime_sglang.transports.flat import FlatBucket, flat_buckets, partner_of
from slime_sglang.transports.servers import Servers

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")
Layers: TypeAlias = "Iterator[Mapping[str, Tensor] | None]"
"""An export on its way: the tensors of each layer by name; None for a layer that another rank has."""

RANKS_WAIT: Final = timedelta(days=1)
"""Longer than any push: each call of the first rank has a bound, but it makes several, and writes files, while the others
wait for it. A rank that dies ends the wait at once: its connections close."""
KINDS: Final = (EngineError, StorageError, RuntimeError)
"""What a failure is to the run: engines are healed and get the weights anew; a disk is not; nor are trainers."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as other ranks are told of it."""

    kind: type[Exception]
    """One of `KINDS`; the last for all that is none of the others."""
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
        return cls(kind, f"{type(error).__name__}: {error}" if kind is RuntimeError else str(error))


def gravest(failures: Sequence[Failure]) -> Failure:
    """Of the first rank that has one of its kind. What healing engines does not mend comes first."""
    return max(failures, key=lambda failure: KINDS.index(failure.kind))


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version, and where it goes."""

    version: int
    engines: Sequence[EngineEndpoint]
    digests: Digests | None = None
    """None: the engines are not compared with the trainer."""

    def digest(self, bucket: FlatBucket) -> None:
        """For the comparison; called once with every bucket that is sent."""
        if self.digests is not None:
            self.digests.add(bucket)


class ServerSender(WeightSender):
    """`send` exports once. Whatever fails, the export is exhausted: other ranks wait for this one in its gathers. At the
    end all ranks know of a failure of one, and all of them fail.

    What the backend says never changes is sent to an engine once, unless all is to be compared.

    No call flushes a cache: with requests that wait SGLang would die of it. Engines do it in `weights_sent`.
    """

    skips_frozen: ClassVar[bool] = True

    def __init__(self, config: SentConfig) -> None:
        self._config = config
        self._place: SenderSetup | None = None
        self._servers: Servers | None = None
        self._ranks: dist.ProcessGroup | None = None
        self._complete: set[EngineEndpoint] = set()
        """Engines that were sent what never changes."""

    def setup(self, setup: SenderSetup) -> None:
        self._place = setup
        self._servers = Servers(self._config.update_weights_timeout)
        if setup.world_size > 1:
            # Ranks that fail early wait here for those that still send.
            self._ranks = dist.new_group(backend="gloo", timeout=RANKS_WAIT)

    @property
    def everywhere(self) -> bool:
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
        layers = iter(export(everywhere=self.everywhere))
        checks = self._config.check_weight_update_equal
        known = self.skips_frozen and not checks and self._complete.issuperset(engines)
        self._complete, complete = set(), self._complete
        report, check = SentReport(), None
        with self.failing_together():
            try:
                if checks and self.place.rank == 0:
                    check = EqualityCheck(self.servers, engines, version)
                update = WeightUpdate(version, engines, None if check is None else check.digests)
                report = self.bring(self._without_frozen(layers) if known else layers, update)
            finally:
                for _ in layers:
                    pass
            if check is not None:
                report = replace(report, compared_with=check.require_equal())
        self._complete = {engine for engine in complete if not replaced(engine, engines)}.union(engines)
        return report

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """What fails inside on one rank fails on all, with errors of one kind: which rank's is heard first is chance."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, or one that is graver
            own, said = error, self.agree(Failure.of(error))
        else:
            said = self.agree(None)
        failures = [failure for failure in said if failure is not None]
        if not failures:
            return
        found = gravest(failures)
        if own is not None and Failure.of(own).kind is found.kind:
            raise own
        raise found.kind(f"another trainer rank could not send weights: {found.text}") from own

    def agree(self, said: T) -> list[T]:
        """What every rank says, by rank."""
        if self._ranks is None:
            return [said]
        answers: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(answers, said, group=self._ranks)
        return answers

    def _without_frozen(self, layers: Layers) -> Layers:
        """Under adapters most of a model: what they touch comes merged, and what SGLang takes only together with it."""
        frozen = self.place.frozen
        for layer in layers:
            yield layer and {
                name: tensor
                for name, tensor in layer.items()
                if name not in frozen or partner_of(name) not in {None, *frozen}
            }

    @abstractmethod
    def bring(self, layers: Layers, update: WeightUpdate) -> SentReport:
        """Brings the weights to every engine of the update."""

    def buckets(self, layers: Layers) -> Iterator[FlatBucket]:
        """Of the layers that this rank has."""
        found = flat_buckets(layers, self._config.update_weight_buffer_size)
        return (bucket for bucket in found if bucket is not None)

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close()
            self._servers = None


def replaced(engine: EngineEndpoint, engines: Sequence[EngineEndpoint]) -> bool:
    """Whether one of these stands in its place."""
    return any(other.index == engine.index and other.incarnation != engine.incarnation for other in engines)


def bucket_name(bucket: FlatBucket, version: int) -> str:
    return f"bucket {bucket.index} of version {version} ({bucket.names[0]} ...)"
