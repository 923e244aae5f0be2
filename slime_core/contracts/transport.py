"""WeightTransport: brings a version of the weights from the trainer's ranks to the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from slime_core.types.report import PublishReport


class TrainerLink(Protocol):
    """The trainer's ranks as a transport sees them."""

    def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """All ranks export; yields rank 0's buckets: the objects themselves in process, references to shared memory
        under Ray. Either can be given to `EngineLink.each`."""


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
