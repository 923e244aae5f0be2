"""RolloutEngine: generates tokens with weights that a trainer sends.

Calling order: perhaps `prepare_start`; `start`; `load_bucket` until the last one; any number of concurrent `generate`; for a
weight update `pause`, `load_bucket`..., `resume`; `stop`. An engine runs in one event loop and may block it for one decode step
at most.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Driver
from slime_core.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from slime_core.contracts.setup import EngineEndpoint, EngineLayout, EngineSetup
    from slime_core.types.completion import Completion, GenerateRequest
    from slime_core.types.schedule import EngineEvent
    from slime_core.types.weights import Bucket


class Capability(StrEnum):
    """What an engine may support beyond plain generation; a config that requires a missing one is an error."""

    DETERMINISTIC = "deterministic"
    """Equal requests submitted together under equal weights give equal bits."""
    BATCH_INVARIANT = "batch_invariant"
    """Equal requests under equal weights give equal bits, whatever the rest of the batch is."""
    TOP_P_IDS = "top_p_ids"
    """Reports the kept token ids of top-p and top-k sampling, so that the trainer can renormalize."""
    REPETITION_PENALTY = "repetition_penalty"
    """Supports `SamplingParams.repetition_penalty` other than 1, defined as in transformers."""
    STRUCTURAL_TAG = "structural_tag"
    """Supports `SamplingParams.structural_tag`; an engine that does not raises EngineRefused for such a request."""
    ROUTED_EXPERTS = "routed_experts"
    """Reports which experts the router of each layer chose for a token, if `EngineSetup.routed_experts` is set."""
    VERSION_SPANS = "version_spans"
    """Reports the policy version of each token span, also when weights change under a running request."""
    SLEEP = "sleep"
    """Can offload and onload its device memory (`sleep`, `wake_up`)."""
    SCORES = "scores"
    """Computes log-probs of given tokens (`score`), as a teacher does."""
    IMAGES = "images"
    """Accepts requests with images, for the loaded model."""
    VIDEOS = "videos"
    """Accepts requests with videos, passed as frames (`Image.frames`)."""
    HTTP = "http"
    """Serves a reward model over HTTP, at `EngineInfo.address`."""
    CHECKSUM = "checksum"
    """Computes `checksum`; an engine whose servers rearrange weights for their kernels cannot, and raises EngineRefused."""
    REPLAY = "replay"
    """Records its events with their decode steps (`drain_events`) and can replay them (`replay_events`)."""
    ADAPTERS = "adapters"
    """Generates with LoRA adapters beside its weights, each request with its own (`GenerateRequest.adapter`)."""
    TRUE_ON_POLICY = "true_on_policy"
    """With `EngineSetup.true_on_policy` its log-probs are bitwise equal to the trainer's (batch-invariant kernels)."""


class MemoryTag(StrEnum):
    """Kinds of device memory that an engine can offload."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "cuda_graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Result of `start`."""

    capabilities: frozenset[Capability]
    """What this engine supports with its model and options; a requirement that is not in it stops the run."""
    address: str | None = None
    """HTTP address, such as `http://127.0.0.1:30000`; None: it serves no HTTP."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that `address` requires; None: none."""
    pid: int | None = None
    """Process id of the server; None: the process that called `start`."""
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of its start that follow each other, as far as they are known."""


class RolloutEngine(ABC):
    """See the module's calling order."""

    async def prepare_start(self, setup: EngineSetup) -> None:
        """Begins what takes long and uses no device memory, such as processes that import their modules, and returns at once:
        trainers still use the devices. `start` with the same setup follows, or `stop`. By default nothing."""

    @abstractmethod
    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Loads the model and returns when the engine can serve; raises EngineError if it cannot."""

    @abstractmethod
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Returns completions in the order of the requests. Requests of one call enter the engine together; calls overlap.

        Raises EngineRefused for a request that a healthy engine does not support. After any other error the run kills the
        engine, starts another one in its place, and sends the request again, to any engine."""

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        """Yields completions as they finish; called by the kernel. All requests enter the engine together, in order. Override
        it if the engine knows which request finished: by default every request is a task of its own."""
        responses = [asyncio.create_task(self.generate([request])) for request in requests]
        try:
            for response in asyncio.as_completed(responses):
                yield (await response)[0]
        finally:
            for response in responses:
                response.cancel()

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns log-probs (float32, nats, temperature 1) of the last `num_tokens[i]` tokens of each sequence. sequences:
        int32 (T,) each, prompt and response. Requires `Capability.SCORES`."""
        raise NotImplementedError

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Aborts these requests (None: all); their `generate` returns the tokens so far with finish reason abort."""

    @abstractmethod
    async def pause(self) -> None:
        """No decode step runs until `resume`; running requests keep their tokens."""

    @abstractmethod
    async def load_bucket(self, bucket: Bucket) -> None:
        """Verifies the checksum and loads whole tensors by name. The last bucket of a version makes it the engine's version:
        cached prefixes of older versions are dropped, and spans of later tokens have the new one."""

    @abstractmethod
    async def resume(self) -> None:
        """Decodes again after `pause`; running requests continue from their tokens. Without a pause it does nothing."""

    @abstractmethod
    async def version(self) -> int:
        """Version of the weights that the next token is sampled with; -1 before the first load."""

    async def endpoints(self) -> Sequence[EngineEndpoint]:
        """Servers to which a transport's senders send weights; empty: weights are loaded by `load_bucket` only."""
        return ()

    async def commit_weights(self, version: int) -> None:
        """Called after a sender sent all weights of `version` to the endpoints. Like the last `load_bucket`: it becomes the
        engine's version and cached prefixes of older ones are dropped. Raises EngineError, with the version that the
        engine has, if the weights did not arrive."""
        raise NotImplementedError

    async def drain_events(self) -> Sequence[EngineEvent]:
        """Events since the last call; empty for an engine without REPLAY, or started without `records`."""
        return ()

    async def replay_events(self, events: Sequence[EngineEvent]) -> None:
        """From now on admits requests at the decode steps of `events`, so that every batch is the same; a pause alone delays
        nothing. After the last event requests are admitted at once again."""
        raise EngineRefused("this engine cannot repeat a recorded schedule")

    @abstractmethod
    async def checksum(self) -> str:
        """xxh3-64 over all weights in the order of their names, in hex; equal to the trainer's if nothing was lost. Requires
        `Capability.CHECKSUM`."""

    @abstractmethod
    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Offloads device memory; only while paused or idle. tags: what to offload, None: everything; memory that is already
        offloaded, or cannot be now, is skipped. `wake_up` restores the weights unchanged."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Onloads memory that `sleep` offloaded. tags: what to onload, None: everything. With WEIGHTS alone new weights can
        be loaded; it can serve when everything is onloaded."""

    @abstractmethod
    async def health(self) -> None:
        """Returns soon if the engine can serve, else raises EngineError. Running requests are not affected."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the engine and all its processes soon, in any state; may be called without `start`, and twice."""


class CallerLost(EngineError):
    """The process of `GenerateRequest.caller` has died; its requests are aborted."""


class EngineCaller(ABC):
    """Makes an engine's calls to its servers, in the process that a request comes from (`GenerateRequest.caller`)."""

    @abstractmethod
    async def call(self, asked: Any) -> Any:
        """asked, and what is returned: plain data of the engine's. Raises what the call in the engine would raise."""

    @abstractmethod
    async def close(self) -> None: ...


class EngineDriver(Driver[RolloutEngine]):
    """Chosen by engine.name."""

    independent_requests: ClassVar[bool] = False
    """True: the run promises no equal bits of its responses, or they are equal whatever enters with a request. Rollout
    workers require it, since their requests enter as they come."""

    transports: ClassVar[tuple[str, ...]] = ()
    """Names of weight transports that it supports, the preferred one first."""
    spans_nodes: ClassVar[bool] = False
    """True: one engine can use devices of several machines."""
    supports_quantized_weights: ClassVar[bool] = False
    """True: engines that loaded a quantized folder accept weight updates quantized in the same way (`Bucket`)."""
    optional_capabilities: ClassVar[frozenset[Capability]] = frozenset()
    """Capabilities that it may have, depending on installation and model; `EngineInfo.capabilities` has the actual ones."""

    @classmethod
    def build_caller(cls, config: Any, *, max_calls: int) -> EngineCaller:
        """For an engine that uses `GenerateRequest.caller`. max_calls: how many it makes at the same time."""
        raise NotImplementedError

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        """Conflicts between options, or with this machine; empty if there are none."""
        return []

    @classmethod
    def layout_problems(cls, config: Any, layout: EngineLayout) -> list[str]:
        """Conflicts between options and `layout`, the devices and features that its engines are started with."""
        return []

    @classmethod
    def push_problems(cls, config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        """Reasons against weight updates. quantization: `quantization_config` of the loaded folder; None: plain weights."""
        return []
