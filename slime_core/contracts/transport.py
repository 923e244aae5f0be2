"""WeightTransport: transfers a version of the weights from the trainer's ranks to the engines.

There are two ways. Buckets in host memory are passed to the engines through the driver (`stream_weights`,
`EngineGroup.call_all`). Or a transport has a sender on every rank of the policy that connects to the engines itself, so that
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
    from slime_core.types.report import ComparedWith, WeightUpdateReport


class TensorExport(Protocol):
    """Function by which a sender reads the weights of its rank."""

    def __call__(self, *, all_ranks: bool) -> Iterator[Mapping[str, Tensor] | None]:
        """See `TrainBackend.export_weights`: every rank must exhaust it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSetup:
    """Arguments of `WeightSender.setup`. `world_size`: ranks of the policy, whose HF folder is `model_path`."""

    rank: int
    world_size: int
    device: Literal["cpu", "cuda"]
    model_path: Path
    run_dir: Path
    colocated: bool
    """True: the engines use the same devices."""
    frozen: frozenset[str] = frozenset()
    """See `TrainBackend.frozen_tensors`."""
    adapter_config: Mapping[str, Any] | None = None
    """See `TrainBackend.adapter_config`; only set for a transport that `sends_adapters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentReport:
    """What one rank sent: bytes, and the number of buckets."""

    bytes_sent: int = 0
    buckets: int = 0
    compared_with: ComparedWith | None = None
    """See `WeightUpdateReport`."""
    density: float | None = None
    """Share of elements that changed since the previous version, in [0, 1]; None: not compared."""


class WeightSender(ABC):
    """The trainer's side of a transport, in the process of each rank of the policy. All ranks get the same calls in the
    same order; with several ranks torch.distributed's default group is initialized."""

    @abstractmethod
    def setup(self, setup: SenderSetup) -> None: ...

    @abstractmethod
    def send(self, export: TensorExport, version: int, engines: Sequence[EngineEndpoint]) -> SentReport:
        """Sends all weights; on return every engine has `version`. Raises EngineError with the engine that refused something.
        engines: the servers, which may differ from those of the last call."""

    def close(self) -> None:
        """Closes groups, files and connections."""


class TrainerLink(Protocol):
    """The trainer's ranks, for a transport."""

    def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """All ranks export; yields rank 0's buckets of at most `bucket_bytes` (or one larger tensor): objects in the same
        process, else references to shared memory. Both can be passed to `EngineGroup.call_all`."""

    async def send(self, version: int, engines: Sequence[EngineEndpoint]) -> Sequence[SentReport]:
        """Calls every rank's sender; returns reports by rank."""


class EngineGroup(Protocol):
    """The engines of the policy, for a transport."""

    @property
    def num_engines(self) -> int: ...

    async def call_all(self, method: str, *args: Any) -> Sequence[Any]:
        """Calls a method of `RolloutEngine` on all engines concurrently; returns results by engine index."""


class WeightTransport(ABC):
    """Runs in the driver's process. `push` is idempotent: another weight update with the same version changes nothing."""

    @abstractmethod
    async def push(self, trainers: TrainerLink, engines: EngineGroup, version: int) -> WeightUpdateReport:
        """Updates all engines, which are paused; raises EngineError with the engine that does not have `version` after it."""

    async def close(self) -> None:
        """Closes groups, files and connections."""


class TransportDriver(Driver[WeightTransport]):
    """Chosen by sync.transport."""

    serves: ClassVar[tuple[str, ...]] = ()
    """Names of engines, for the listing; `EngineDriver.transports` decides."""
    sends_adapters: ClassVar[bool] = False
    """Its senders get the tensors of `TrainBackend.export_adapter`; the engines keep the weights of their folder."""
    sends_nothing: ClassVar[bool] = False
    """For weights that never change: engines get their version alone."""

    @classmethod
    def problems(cls, config: Any, engine: Any) -> list[str]:
        """Conflicts between its options and those of the engine; empty if there are none."""
        return []

    @classmethod
    def layout_problems(cls, config: Any, engine: Any, layout: EngineLayout) -> list[str]:
        """Conflicts between its options and `layout`, the devices and features of the engines; empty if there are none."""
        return []

    @classmethod
    def push_problems(cls, config: Any, engine: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        """Reasons why it cannot update engines with this quantization; see `EngineDriver.push_problems`."""
        return []

    @classmethod
    def build_sender(cls, config: Any) -> WeightSender | None:
        """Builds the sender of a rank of the policy; None: the transport has no senders and does not use `TrainerLink.send`."""
        return None
