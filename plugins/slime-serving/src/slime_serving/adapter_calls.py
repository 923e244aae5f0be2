"""AdapterCalls: the calls of an engine over servers that are about adapters."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineRefused
from slime_core.types.weights import Bucket
from slime_serving.adapters import ServedAdapters
from slime_serving.in_flight import RequestsInFlight
from slime_serving.requests import vocab_size_of
from slime_serving.whole_calls import WholeCalls
from slime_training.adapters.engine import AdapterEngine, PromptLogProbs


class Scores(Protocol):
    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]: ...

    async def prompt(self, tokens: npt.NDArray[np.int32], top_k: int, adapter: str | None) -> PromptLogProbs:
        """tokens: two or more."""


class AdapterCalls(AdapterEngine):
    """A base beside `ServingEngine`."""

    _scores: Scores | None
    _adapters: ServedAdapters | None
    """None: its servers hold no adapters."""
    _scoring: dict[str, set[asyncio.Future[list[PromptLogProbs | BaseException]]]]
    """Calls of `prompt_log_probs` under way, by adapter."""
    _calls: WholeCalls
    """Those of `drop_adapter` are shared, by adapter."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """Of the engine, in messages."""

    @abstractmethod
    def _ready(self) -> EngineSetup:
        """Raises EngineError unless the engine serves."""

    @abstractmethod
    def _asked(self) -> RequestsInFlight:
        """Raises EngineRefused for an engine that does not generate."""

    async def load_adapter(self, name: str, scale: float, bucket: Bucket) -> None:
        """See `ServedAdapters.load`. One of this name that is being dropped is gone before."""
        adapters = self._with_adapters()
        await self._calls.until_ended(name)
        await adapters.load(name, scale, bucket)

    async def drop_adapter(self, name: str) -> None:
        """Returns when no server has it: its requests are aborted, and log-probs of prompts computed to their end."""
        await self._calls.shared(name, partial(self._drop, self._with_adapters(), self._asked(), name))

    async def _drop(self, adapters: ServedAdapters, in_flight: RequestsInFlight, name: str) -> None:
        adapters.withdraw(name)
        await in_flight.abort(in_flight.using(name))
        if scoring := self._scoring.get(name):
            await asyncio.wait(set(scoring))
        await adapters.free(name)

    async def prompt_log_probs(
        self, prompts: Sequence[npt.NDArray[np.int32]], top_k: int, adapter: str | None
    ) -> list[PromptLogProbs]:
        """By one request per prompt, all at once. Raises EngineRefused for what `AdapterEngine.prompt_log_probs` names."""
        setup, scores = self._ready(), self._scores
        assert scores is not None
        adapters = self._with_adapters()
        if problem := adapters.problem(adapter):
            raise EngineRefused(f"{self._name}: {problem}")
        served = None if adapter is None else adapters.served_name(adapter)
        if top_k > (size := vocab_size_of(setup)):
            raise EngineRefused(f"{self._name}: top_k = {top_k}, and the vocabulary has {size} tokens.")
        # With exceptions: it is done only when the last one is, also if the first was refused.
        work = (self._prompt(scores, tokens, top_k, served) for tokens in prompts)
        call = asyncio.gather(*work, return_exceptions=True)
        if adapter is not None:
            calls = self._scoring.setdefault(adapter, set())
            calls.add(call)
            call.add_done_callback(calls.discard)
        found = []
        for one in await call:
            if isinstance(one, BaseException):
                raise one
            found.append(one)
        return found

    async def _prompt(
        self, scores: Scores, tokens: npt.NDArray[np.int32], top_k: int, adapter: str | None
    ) -> PromptLogProbs:
        if len(tokens) > 1:
            return await scores.prompt(tokens, top_k, adapter)
        return PromptLogProbs(
            log_probs=np.empty(0, np.float32),
            top_ids=np.empty((0, top_k), np.int32),
            top_log_probs=np.empty((0, top_k), np.float32),
        )

    def _with_adapters(self) -> ServedAdapters:
        self._ready()
        if self._adapters is None:
            raise EngineRefused(f"{self._name}: it is started without adapters. Set engine.max_adapters.")
        return self._adapters
