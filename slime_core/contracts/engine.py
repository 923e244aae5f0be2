"""RolloutEngine: continues token sequences, with weights that a trainer brings.

Calling order: `start`; `load_bucket` until the last one; any number of `generate` at once; for new weights `pause`,
`load_bucket`..., `resume`; `stop`. An engine runs in one event loop and may not block it longer than a decode step.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Driver
from slime_core.errors import EngineRefused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from slime_core.contracts.setup import EngineEndpoint, EngineLayout, EngineSetup
    from slime_core.types.completion import Completion, GenerateRequest
    from slime_core.types.schedule import EngineEvent
    from slime_core.types.weights import Bucket


class Capability(StrEnum):
    """What an engine may offer beyond plain generation; asking for a missing one is a config error."""

    DETERMINISTIC = "deterministic"
    """Equal requests submitted together under equal weights give equal bits."""
    BATCH_INVARIANT = "batch_invariant"
    """...whatever else runs beside them."""
    TOP_P_IDS = "top_p_ids"
    """Reports the kept token ids of top-p and top-k sampling, so that the trainer can renormalise."""
    REPETITION_PENALTY = "repetition_penalty"
    """Takes `SamplingParams.repetition_penalty` other than 1, in transformers' meaning."""
    ROUTED_EXPERTS = "routed_experts"
    """Tells which experts the router of each layer chose for a token, where `EngineSetup.routed_experts` asks for it."""
    VERSION_SPANS = "version_spans"
    """Reports the policy version of each token span, also when weights change under a running request."""
    SLEEP = "sleep"
    SCORES = "scores"
    """Gives the log-probs of tokens that it is given, as a teacher does."""
    IMAGES = "images"
    """Takes requests with images, for the model that it has."""
    VIDEOS = "videos"
    """And with videos, which it is given as frames (`Image.frames`)."""
    HTTP = "http"
    """Serves a reward model to others, at `EngineInfo.address`."""
    REPLAY = "replay"
    """Writes down what comes to it and after which decode step (`recorded`), and can repeat that (`follow`)."""
    TRUE_ON_POLICY = "true_on_policy"
    """Told to (`EngineSetup.true_on_policy`), it computes with batch-invariant kernels alone: the log-probs of what it decoded
    are those of a trainer that does so too, to the bit."""


class Memory(StrEnum):
    """What an engine holds on its devices, and may give back for a while."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "cuda_graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What `start` found out."""

    capabilities: frozenset[Capability]
    address: str | None = None
    """Where it can be reached by HTTP, if it can."""
    token: str | None = field(default=None, repr=False)
    """The bearer token that `address` asks for."""
    pid: int | None = None
    """Of the process that serves; by default the one that called `start`."""


class RolloutEngine(ABC):
    """See the module's calling order."""

    @abstractmethod
    async def start(self, setup: EngineSetup) -> EngineInfo: ...

    @abstractmethod
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answers in the order of the requests. Requests of one call enter the engine together; calls overlap.

        EngineRefused for a request that it does not serve, though it is well. After any other error the run stops it hard,
        starts another one in its place and asks that one (or a neighbour) again."""

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        """Answers as they end; what the kernel calls. All requests enter the engine in one turn of its loop, in order.

        An engine that can say which answer ended should override this: here every request is a task.
        """
        answers = [asyncio.create_task(self.generate([request])) for request in requests]
        try:
            for answer in asyncio.as_completed(answers):
                yield (await answer)[0]
        finally:
            for answer in answers:
                answer.cancel()

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """Of each sequence the log-probs of its last `num_tokens` tokens, each given those before it, at temperature 1.
        Only with `Capability.SCORES`."""
        raise NotImplementedError

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends these requests (None: all) with what they have; their `generate` returns finish reason abort."""

    @abstractmethod
    async def pause(self) -> None:
        """No decode step runs until `resume`; running requests keep their tokens."""

    @abstractmethod
    async def load_bucket(self, bucket: Bucket) -> None:
        """Loads whole tensors by name, after checking the checksum. With the last bucket of a version it becomes the
        engine's version, cached prefixes of older ones are dropped, and later tokens carry it in their spans."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def version(self) -> int:
        """Of the weights that the next token is sampled from; -1 before the first load."""

    async def endpoints(self) -> Sequence[EngineEndpoint]:
        """Where a transport's senders reach its servers; none: weights come by `load_bucket` alone."""
        return ()

    async def weights_sent(self, version: int) -> None:
        """A sender has brought all weights of `version` to the endpoints. Like the last `load_bucket`: it becomes the
        engine's version and cached prefixes of older ones are dropped, or EngineError says what the engine holds
        instead."""
        raise NotImplementedError

    async def recorded(self) -> Sequence[EngineEvent]:
        """What came to it since the last call; nothing of an engine without REPLAY, or that was started without `records`."""
        return ()

    async def follow(self, events: Sequence[EngineEvent]) -> None:
        """From now on what comes is let in when it came then, so that every batch is the same; a pause alone holds nothing.
        After the last event everything is let in at once again."""
        raise EngineRefused("this engine cannot repeat a recorded schedule")

    @abstractmethod
    async def checksum(self) -> str:
        """xxh3-64 over all weights, in the order of names: equal to the exporter's when nothing was lost."""

    @abstractmethod
    async def sleep(self, tags: Sequence[Memory] | None = None) -> None:
        """Gives the device memory of these back (None: of all); only while nothing runs, or paused. Weights come back as
        they were. What it has given back already is passed over, what it cannot give back now it keeps."""

    @abstractmethod
    async def wake(self, tags: Sequence[Memory] | None = None) -> None:
        """Takes memory again that it gave back; None: all of it. With its weights alone new ones can be loaded; it is
        awake when it has everything."""

    @abstractmethod
    async def health(self) -> None:
        """Returns soon if the engine can serve; raises EngineError if not. What others are answered does not change by it."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends it with all its processes, soon, in whatever state it is; also without `start`, and twice."""


class EngineDriver(Driver[RolloutEngine]):
    transports: ClassVar[tuple[str, ...]] = ()
    """Names of weight transports that it understands, the preferred one first."""
    spans_nodes: ClassVar[bool] = False
    """One engine may have devices on several machines."""
    takes_quantized: ClassVar[bool] = False
    """Engines that started from a folder with quantised weights take new ones, quantised in the same way (`Bucket`)."""
    may_offer: ClassVar[frozenset[Capability]] = frozenset()
    """What an installation of it can offer at best; `EngineInfo` says what it does offer."""

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        """Options that cannot work together or on this machine."""
        return []

    @classmethod
    def layout_problems(cls, config: Any, layout: EngineLayout) -> list[str]:
        """Options that cannot work with what its engines are started with."""
        return []

    @classmethod
    def push_problems(cls, config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        """What keeps engines from taking new weights. `quantization`: the `quantization_config` of the folder that they start
        from; None: plain weights."""
        return []
