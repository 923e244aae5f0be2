"""ScriptedEngine: a rollout engine without a model; each response is a function of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from slime_core.contracts.engine import Capability, EngineInfo, MemoryTag, RolloutEngine
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_core.types.sample import VersionSpan
from slime_core.types.weights import Bucket

FIRST_TOKEN: Final = 2
"""Lower ids are padding and the end of the text."""
VERSION: Final = 7


class ScriptedEngine(RolloutEngine):
    """The token at position p is a function of the request's seed and p alone, so an aborted response continues
    as if it had not been aborted. One token in twelve ends a response.

    `held`: no response is returned until `release` or an abort. `failure` is raised instead of a response. `refuses`: the
    number of the bucket that is refused; `stays_at`: the version that it keeps, whatever it loads.
    """

    guided = False
    """Whether it accepts a structural tag; the script must then respect it."""

    def __init__(
        self,
        *,
        vocab_size: int = 30,
        held: bool = False,
        failure: Exception | None = None,
        refuses: int | None = None,
        stays_at: int | None = None,
    ) -> None:
        self.completions: list[Completion] = []
        """Every response so far."""
        self.buckets: list[Bucket] = []
        """What was loaded."""
        self.begun = asyncio.Event()
        """A request has come in."""
        self._vocab_size = vocab_size
        self._failure = failure
        self._refuses = refuses
        self._stays_at = stays_at
        self._released = asyncio.Event()
        if not held:
            self._released.set()
        self._running: dict[str, asyncio.Event] = {}
        self._tensors: dict[str, bytes] = {}
        self._version = VERSION if stays_at is None else stays_at
        self.served_at: tuple[EngineEndpoint, ...] = ()
        """Where senders reach it."""

    def release(self) -> None:
        self._released.set()

    async def start(self, setup: EngineSetup) -> EngineInfo:
        return EngineInfo(capabilities=frozenset({Capability.DETERMINISTIC, Capability.VERSION_SPANS}))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(request) for request in requests)))

    async def _complete(self, request: GenerateRequest) -> Completion:
        if self._failure is not None:
            raise self._failure
        if request.sampling.structural_tag is not None and not self.guided:
            raise EngineRefused("scripted engine: it has no guided decoding (structural_tag).")
        self.begun.set()
        aborted = self._running[request.request_id] = asyncio.Event()
        waits = [asyncio.create_task(event.wait()) for event in (self._released, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            # Responses take turns, as in an engine that decodes them together.
            for _ in range(request.seed % 5):
                await asyncio.sleep(0)
        finally:
            for wait in waits:
                wait.cancel()
            del self._running[request.request_id]
        tokens, reason = self.script(request)
        if aborted.is_set():
            tokens, reason = tokens[: len(tokens) // 2], FinishReason.ABORT
        completion = Completion(
            request_id=request.request_id,
            token_ids=tokens,
            log_probs=-0.125 * (1 + tokens % 7).astype(np.float32),
            finish_reason=reason,
            spans=(VersionSpan(self._version, 0, len(tokens)),) if len(tokens) else (),
        )
        self.completions.append(completion)
        return completion

    def script(self, request: GenerateRequest) -> tuple[npt.NDArray[np.int32], FinishReason]:
        """The tokens of the response, and why it ends, if the request is not aborted."""
        tokens: list[int] = []
        start = len(request.token_ids)
        for position in range(start, start + request.sampling.max_new_tokens):
            draw = xxhash.xxh3_64_intdigest(f"{request.seed}/{position}".encode())
            tokens.append(FIRST_TOKEN + draw % (self._vocab_size - FIRST_TOKEN))
            if draw % 12 == 0 and len(tokens) >= request.sampling.min_new_tokens:
                return np.array(tokens, np.int32), FinishReason.STOP
        return np.array(tokens, np.int32), FinishReason.LENGTH

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for request_id, aborted in self._running.items():
            if request_ids is None or request_id in request_ids:
                aborted.set()

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load_bucket(self, bucket: Bucket) -> None:
        # A turn of the loop, so that a push that does not wait shows.
        await asyncio.sleep(0)
        self.receive(bucket)

    def receive(self, bucket: Bucket) -> None:
        """What `load_bucket` does, for callers without an event loop."""
        if bucket.index == self._refuses or xxhash.xxh3_64_hexdigest(bucket.data.tobytes()) != bucket.checksum:
            raise EngineError(f"scripted engine: bucket {bucket.index} of version {bucket.version} is refused")
        self.buckets.append(bucket)
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            self._tensors[name] = bucket.data[start : start + size].tobytes()
            start += size
        if bucket.last and self._stays_at is None:
            self._version = bucket.version

    async def endpoints(self) -> Sequence[EngineEndpoint]:
        return self.served_at

    async def commit_weights(self, version: int) -> None:
        if self._version != version:
            raise EngineError(f"scripted engine: version {version} was sent, it holds {self._version}")

    async def version(self) -> int:
        return self._version

    async def checksum(self) -> str:
        return checksum_of(self._tensors)

    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None: ...

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None: ...

    async def health(self) -> None: ...

    async def stop(self) -> None: ...


def checksum_of(tensors: dict[str, bytes]) -> str:
    """The checksum that an exporter computes for these weights."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


class EngineInLoop:
    """`slime_core.rollout.client.EngineHandle` of an engine in this event loop."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        return self._engine.stream(requests)

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._engine, method)(*args)
