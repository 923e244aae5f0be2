"""WeightTransport: brings a version of the weights from the trainer's ranks to the engines.

There are two ways. Buckets in host memory can be handed to the engines through the driver (`stream_weights`,
`EngineLink.each`). Or a transport has a sender on every rank of the policy, which talks to the engines itself, so that
tensors never leave their device or their machine's memory (`TrainerLink.send`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from torch import Tensor

    from slime_core.contracts.setup import EngineEndpoint, EngineLayout
    from slime_core.types.report import ComparedWith, PublishReport


class TensorExport(Protocol):
    """The weights of one rank, as a sender reads them."""

    def __call__(self, *, everywhere: bool) -> Iterator[Mapping[str, Tensor] | None]:
        """See `TrainBackend.export_tensors`: every rank must exhaust it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSetup:
    """Where a sender stands."""

    rank: int
    world_size: int
    device: Literal["cpu", "cuda"]
    model_path: Path
    run_dir: Path
    colocated: bool
    """The engines' processes use the same devices."""
    frozen: frozenset[str] = frozenset()
    """See `TrainBackend.frozen_tensors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentReport:
    """What one rank sent."""

    bytes_sent: int = 0
    buckets: int = 0
    compared_with: ComparedWith | None = None
    """See `PublishReport`."""
    density: float | None = None
    """Share of the elements that are others than in the version before; None: it did not compare."""


class WeightSender(ABC):
    """The trainer's side of a transport, in the process of each rank of the policy. All ranks get the same calls in the
    same order; torch.distributed's default group is there when there are several."""

    @abstractmethod
    def setup(self, setup: SenderSetup) -> None: ...

    @abstractmethod
    def send(self, export: TensorExport, version: int, engines: Sequence[EngineEndpoint]) -> SentReport:
        """On return every engine holds `version`. Engines may be others than the last time. EngineError says which engine
        did not take what."""

    def close(self) -> None:
        """Gives up groups, files and connections."""


class TrainerLink(Protocol):
    """The trainer's ranks as a transport sees them."""

    def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """All ranks export; yields rank 0's buckets: the objects themselves in process, references to shared memory
        where they are in other processes. Either can be given to `EngineLink.each`."""

    async def send(self, version: int, engines: Sequence[EngineEndpoint]) -> Sequence[SentReport]:
        """Every rank's sender sends; reports by rank."""


class EngineLink(Protocol):
    """The engines as a transport sees them."""

    @property
    def num_engines(self) -> int: ...

    async def each(self, method: str, *args: Any) -> Sequence[Any]:
        """Calls a method of the engine contract on every engine at once; results by engine index."""


class WeightTransport(ABC):
    """`push` is idempotent: pushing a version again changes nothing."""

    @abstractmethod
    async def push(self, trainers: TrainerLink, engines: EngineLink, version: int) -> PublishReport:
        """Engines are paused. On return every engine has the version, or EngineError says which has not."""

    async def close(self) -> None:
        """Gives up groups, files and connections."""


class TransportDriver(Driver[WeightTransport]):
    serves: ClassVar[tuple[str, ...]] = ()
    """Names of engines, for the listing; an engine's own `transports` decides."""

    @classmethod
    def problems(cls, config: Any, engine: Any) -> list[str]:
        """What does not fit between its options and those of the engine."""
        return []

    @classmethod
    def layout_problems(cls, config: Any, engine: Any, layout: EngineLayout) -> list[str]:
        """What does not fit between its options and what the engines are started with."""
        return []

    @classmethod
    def push_problems(cls, config: Any, engine: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        """What keeps it from bringing weights to engines that hold them so; see `EngineDriver.push_problems`."""
        return []

    @classmethod
    def build_sender(cls, config: Any) -> WeightSender | None:
        """The side that runs in the trainer's ranks; None: there is none, and `TrainerLink.send` is not used."""
        return None
