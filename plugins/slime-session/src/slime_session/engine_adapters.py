"""EngineAdapters: the snapshots that the engines hold, and requests that name one or none.

The matrices of a snapshot stay in this process as well, so that an engine that was lost and restarted gets them again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from slime_core import groups as entry_groups
from slime_core.config.bound import BoundRun
from slime_core.contracts.engine import Capability
from slime_core.controller.session import Session
from slime_core.errors import ConfigError, DataError, EngineRefused
from slime_core.registry import boundary
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.types.batch import Int32
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.weights import Bucket
from slime_session.aborted_tasks import all_or_aborted
from slime_session.engine_weights import EngineWeights
from slime_session.named_plugins import those_with
from slime_session.vocabulary import Vocabulary
from slime_training.adapters.drivers import AdapterSampler
from slime_training.adapters.engine import PromptLogProbs

ATTEMPTS: Final = 3
"""An engine may be restarted between two of them."""


@dataclass(kw_only=True, eq=False)
class HeldSnapshot:
    name: str
    adapter: str | None
    """Of which it was taken; None: it was loaded."""
    scale: float
    bucket: Bucket
    engines: dict[int, EngineHandle] = field(default_factory=dict)
    """Those that have it."""
    is_dropped: bool = False


class EngineAdapters:
    def __init__(self, session: Session, weights: EngineWeights) -> None:
        self._session = session
        self._weights = weights
        self._names = itertools.count()
        self._requests = itertools.count()
        self._held: dict[str, HeldSnapshot] = {}
        self._loading = asyncio.Lock()
        self._vocabulary = Vocabulary.of(session.run)
        self._drops: set[asyncio.Task[None]] = set()

    async def hold(self, adapter: str | None, scale: float, bucket: Bucket) -> HeldSnapshot:
        """Loads it into every engine."""
        run = self._session.run
        most = max_snapshots(run)
        if len(self._held) >= most:
            raise ConfigError(
                f"snapshot: the engines hold {len(self._held)} already. Drop one, or set a larger engine.max_adapters ({most})."
            )
        held = HeldSnapshot(
            name=f"{adapter or 'loaded'}@{next(self._names)}", adapter=adapter, scale=scale, bucket=bucket
        )
        self._held[held.name] = held
        try:
            await self.ensure(held)
        except BaseException:
            await self.drop(held)
            raise
        return held

    async def ensure(self, held: HeldSnapshot) -> None:
        """Every engine in service has it afterwards. ConfigError if it was dropped."""
        client = client_of(self._session, "snapshot")
        # Requests of many threads wait for one load.
        async with self._loading:
            if held.is_dropped:
                raise ConfigError(f'snapshot "{held.name}": it was dropped. Take another one.')
            for index in client.indices:
                engine = client.engine(index)
                if engine is None or held.engines.get(index) is engine:
                    continue
                if await client.ask_one(index, "load_adapter", held.name, held.scale, held.bucket):
                    held.engines[index] = engine

    async def drop(self, held: HeldSnapshot) -> None:
        """All engines drop it, also if the caller does not wait: an engine that keeps it has no room for another."""
        held.is_dropped = True
        self._held.pop(held.name, None)
        client = client_of(self._session, "snapshot")
        task = asyncio.create_task(self._drop(held, client))
        self._drops.add(task)
        task.add_done_callback(self._dropped)
        await asyncio.shield(task)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        self._drops.discard(task)
        if not task.cancelled():
            # Else asyncio logs the error where no one waits any more.
            task.exception()

    async def close(self) -> None:
        """Waits for drops whose callers have gone: a server that is not this run's own keeps what it holds."""
        await asyncio.gather(*self._drops, return_exceptions=True)

    async def _drop(self, held: HeldSnapshot, client: EngineClient) -> None:
        # An engine that loads it at the moment has it afterwards.
        async with self._loading:
            errors: list[Exception] = []
            for index, engine in held.engines.items():
                if client.engine(index) is engine:
                    with boundary.held() as failed:
                        await client.ask_one(index, "drop_adapter", held.name)
                    errors += [] if failed.error is None else [failed.error]
            held.engines.clear()
            if errors:
                raise errors[0]

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        held: HeldSnapshot | None,
    ) -> list[Completion]:
        """In the order of the prompts. They enter an engine together."""
        client = client_of(self._session, "generate")
        self._weights.require_whole("generate")
        if len(prompts) != len(seeds):
            raise DataError(f"generate: {len(prompts)} prompts and {len(seeds)} seeds: pass a seed for each prompt.")
        if problem := sampling.problem(self._vocabulary.size or 2**31):
            raise ConfigError(f"generate: {problem}.")
        tokens = [self._tokens_of(prompt, place) for place, prompt in enumerate(prompts)]
        if held is not None:
            await self.ensure(held)
        requests = [
            GenerateRequest(
                request_id=f"generate/{next(self._requests)}",
                token_ids=own,
                sampling=sampling,
                seed=seed,
                adapter=None if held is None else held.name,
            )
            for own, seed in zip(tokens, seeds, strict=True)
        ]
        tasks = [asyncio.create_task(self.ask(one, held)) for one in requests]
        return await all_or_aborted(tasks, lambda: client.abort([request.request_id for request in requests]))

    def with_snapshot(self, held: HeldSnapshot) -> SnapshotClient:
        return SnapshotClient(self, held)

    async def ask(self, request: GenerateRequest, held: HeldSnapshot | None) -> Completion:
        """EngineRefused for what engines that have the snapshot do not support."""
        client = client_of(self._session, "generate")
        if held is None:
            return await client.generate(request)
        attempts = 0
        while True:
            attempts += 1
            try:
                return await client.generate(request)
            except EngineRefused:
                if held.is_dropped:
                    return Completion.empty(request, FinishReason.ABORT)
                if attempts == ATTEMPTS:
                    raise
            # An engine that was restarted does not have it yet.
            await self.ensure(held)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await client_of(self._session, "generate").abort(request_ids)

    async def prompt_log_probs(
        self, prompts: Sequence[Sequence[int]], top_k: int, held: HeldSnapshot | None
    ) -> list[PromptLogProbs]:
        require_sampler(self._session.run, "prompt_log_probs")
        client = client_of(self._session, "prompt_log_probs")
        self._weights.require_whole("prompt_log_probs")
        if held is not None:
            await self.ensure(held)
        name = None if held is None else held.name
        tokens = [self._tokens_of(prompt, place) for place, prompt in enumerate(prompts)]
        while True:
            await client.serving()
            index = client.indices[next(self._requests) % client.num_engines]
            if found := await client.ask_one(index, "prompt_log_probs", tokens, top_k, name):
                (responses,) = found
                return list(responses)

    def _tokens_of(self, prompt: Sequence[int], place: int) -> Int32:
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or not len(tokens):
            raise DataError(f"prompts[{place}]: shape {tokens.shape}; a prompt is a list of at least one token id.")
        self._vocabulary.require(tokens, f"prompts[{place}]")
        return tokens.astype(np.int32)


class SnapshotClient:
    """What a `GroupRunner` asks of an `EngineClient`, for requests that name a snapshot: an engine that is restarted gets it
    again."""

    def __init__(self, engines: EngineAdapters, held: HeldSnapshot) -> None:
        self._engines = engines
        self.held = held

    async def prepare(self) -> None:
        await self._engines.ensure(self.held)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._engines.ask(request, self.held)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engines.abort(request_ids)


def client_of(session: Session, call: str) -> EngineClient:
    if session.client is None:
        raise ConfigError(f"{call}: this run has no engine, since its collector needs none.")
    return session.client


def require_sampler(run: BoundRun, call: str) -> None:
    """ConfigError if the run's engines do not sample with adapters."""
    engine = run.engine
    assert engine is not None
    if Capability.ADAPTERS not in engine.driver.optional_capabilities or not issubclass(engine.driver, AdapterSampler):
        raise ConfigError(
            f'{call}: engine "{engine.entry.name}" samples with no adapters. Engines that do: '
            f"{those_with(run, entry_groups.ENGINES, AdapterSampler)}."
        )


def max_snapshots(run: BoundRun) -> int:
    require_sampler(run, "snapshot")
    assert run.engine is not None
    return int(run.engine.driver.max_adapters(run.engine.config))
