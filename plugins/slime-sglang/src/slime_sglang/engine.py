"""SglangEngine: the engine contract over one or several SGLang servers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.contracts.engine import Capability, EngineInfo, Memory, RolloutEngine
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.weights import Bucket
from slime_sglang.config import SglangOptions
from slime_sglang.experts import ExpertSizes
from slime_sglang.features import Features
from slime_sglang.fleet import Fleet
from slime_sglang.held_weights import HeldWeights
from slime_sglang.in_flight import RequestsInFlight
from slime_sglang.option_checks import problem_of_experts
from slime_sglang.request_check import RequestCheck
from slime_sglang.scoring import Scorer
from slime_sglang.server.hook_table import UNPINNED_EXPERTS, in_source


class SglangEngine(RolloutEngine):
    """Every request is one POST on a shared pool of connections. While the engine is paused requests wait here, and
    those that were running are sent again with their tokens so far; `engine.pause_mode` has the other ways.

    Log-probs are those of the full vocabulary at the sampling temperature, except where 0 < min_new_tokens <
    max_new_tokens: there SGLang leaves the end tokens out of the first tokens' distribution.
    """

    def __init__(self, config: SglangOptions) -> None:
        self._config = config
        self._setup: EngineSetup | None = None
        self._fleet = Fleet(config)
        self._features = Features()
        self._requests: RequestsInFlight | None = None
        """None: it answers others, or is a machine beside the first one."""
        self._scorer = Scorer(self._fleet, timeout_s=config.request_timeout, require_alive=self._ready)
        self._failure: EngineError | None = None
        self._incarnation = secrets.token_hex(8)
        self._paused = False
        self._pauses = 0
        self._absent: set[Memory] = set()
        """What was given back."""

    # ---------------------------------------------------------------- life

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Starts the servers, or finds the external ones. EngineError if one dies, hangs, or has another model."""
        if self._setup is not None:
            raise EngineError(f"engine {setup.index} has been started already.")
        experts = expert_sizes(self._config, setup) if setup.routed_experts else None
        self._setup = setup
        try:
            await self._fleet.start(setup)
            if not setup.node_rank:
                if not setup.reward_model:
                    await self._prepare(setup, experts)
                await self._fleet.start_router(setup)
        except BaseException:
            await self.stop()
            raise
        self._fleet.watch(self._fail)
        if setup.node_rank:
            return EngineInfo(capabilities=frozenset(), pid=self._fleet.pid)
        # What a reward model answers to whom is between it and the rewards.
        offered = {Capability.HTTP} if setup.reward_model else self._features.capabilities(self._config, setup)
        entrance, pid = self._fleet.entrance, self._fleet.pid
        return EngineInfo(capabilities=frozenset(offered), address=entrance.address, token=entrance.token, pid=pid)

    async def _prepare(self, setup: EngineSetup, experts: ExpertSizes | None) -> None:
        """Asks the servers what they can do; makes what answers requests and takes weights."""
        self._features = await Features.of_all(self._fleet.servers, self._config, setup)
        weights = self._weights = HeldWeights(self._fleet, self._config, setup, self._features)
        self._requests = RequestsInFlight(
            self._fleet,
            self._config,
            setup,
            check=RequestCheck.of(setup, self._features, tells_experts=experts is not None),
            experts=experts,
            version=lambda: weights.given,
        )

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        if self._requests is not None:
            self._requests.fail(failure)

    async def stop(self) -> None:
        """Requests that still run fail with EngineError. Stopping twice, or before `start`, does nothing."""
        if self._failure is None and self._setup is not None:
            self._fail(EngineError(f"{self._name} was stopped."))
        await self._fleet.stop()

    async def health(self) -> None:
        """Asks each server; one that is paused or asleep is not asked to generate, which is what both of SGLang's health
        routes do: its scheduler is asked for its state. On a machine beside the first one its process is all there is."""
        if self._ready().node_rank:
            return
        before = self._pauses
        if not (self._paused or self._absent):
            try:
                await self._fleet.ask_health("/health_generate")
                return
            except EngineError:
                self._ready()
                # A pause ends the token that it asked for.
                if not self._paused and self._pauses == before:
                    raise
        try:
            await self._fleet.ask_health("/server_info")
        except EngineError:
            self._ready()
            raise

    @property
    def _name(self) -> str:
        return "engine sglang" if self._setup is None else f"engine {self._setup.index}"

    def _ready(self) -> EngineSetup:
        if self._setup is None:
            raise EngineError("engine sglang: not started; call start first.")
        if self._failure is not None:
            raise self._failure
        return self._setup

    # ---------------------------------------------------------------- requests

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Raises EngineRefused for a request that cannot be served, before any of the call runs."""
        in_flight = self._takes()
        tasks = in_flight.enter(requests)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await in_flight.leave(tasks)

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        """As `generate`, each answer when it ends."""
        in_flight = self._takes()
        tasks = in_flight.enter(requests)
        ended: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        try:
            for _ in tasks:
                yield (await ended.get()).result()
        finally:
            await in_flight.leave(tasks)

    def _takes(self) -> RequestsInFlight:
        """For one that generates, and is awake."""
        in_flight = self._asked()
        if self._absent:
            raise EngineRefused(f"{self._name}: generate while asleep; call wake first.")
        return in_flight

    def _asked(self) -> RequestsInFlight:
        self._ready()
        if self._requests is None:
            raise EngineRefused(f"{self._name} is asked by rewards alone, or is a machine beside the first one.")
        return self._requests

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ids that are not running are ignored: they may just have ended. Returns when all have ended."""
        await self._asked().abort(request_ids)

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """A request each, all at once; over the servers in turn."""
        self._ready()
        if self._absent:
            raise EngineRefused(f"{self._name}: score while asleep; call wake first.")
        return await self._scorer.score(sequences, num_tokens)

    # ---------------------------------------------------------------- weights

    async def pause(self) -> None:
        """See `engine.pause_mode`. Pausing twice does nothing."""
        in_flight = self._asked()
        if self._paused:
            return
        self._paused = True
        self._pauses += 1
        in_flight.hold()
        if self._config.pause_mode == "abort":
            await in_flight.break_off()
        await self._fleet.post("/pause_generation", {"mode": self._config.pause_mode})

    async def resume(self) -> None:
        """Raises EngineError if a version is partly loaded."""
        in_flight = self._asked()
        if self._weights.incomplete:
            raise EngineError(f"{self._name}: resume while a version is partly loaded; send all its buckets first.")
        if not self._paused:
            return
        await self._fleet.post("/continue_generation", {})
        self._paused = False
        in_flight.go_on()

    async def load_bucket(self, bucket: Bucket) -> None:
        """See `BucketOrder.check`; also EngineError while not paused, since SGLang would wait for running requests."""
        self._ready()
        if Memory.WEIGHTS in self._absent or not self._paused:
            raise EngineError(f"{self._name}: load_bucket needs a paused engine that is awake; call pause first.")
        await self._weights.load(bucket)

    async def version(self) -> int:
        """See `HeldWeights.version`."""
        self._ready()
        return await self._weights.version()

    async def checksum(self) -> str:
        """See `HeldWeights.checksum`."""
        self._ready()
        return await self._weights.checksum()

    # ---------------------------------------------------------------- memory

    async def sleep(self, tags: Sequence[Memory] | None = None) -> None:
        """Frees what SGLang's memory saver holds of these; the weights are kept on the host. Requests that a pause holds
        wait here, so the servers are idle."""
        self._ready()
        running = 0 if self._requests is None else len(self._requests)
        gone = [tag for tag in (Memory if tags is None else tags) if tag not in self._absent]
        if not gone:
            return
        if running and not (self._paused and self._config.pause_mode == "abort"):
            raise EngineRefused(f"{self._name}: sleep while {running} requests run; abort them first.")
        if Memory.KV_CACHE in gone:
            await self._fleet.flush()
        await self._fleet.post("/release_memory_occupation", {"tags": gone})
        self._absent.update(gone)

    async def wake(self, tags: Sequence[Memory] | None = None) -> None:
        """All memory again, or that of `tags`."""
        self._ready()
        # SGLang dies of a tag that it has not released.
        missing = [tag for tag in (Memory if tags is None else tags) if tag in self._absent]
        if missing:
            await self._fleet.post("/resume_memory_occupation", {"tags": missing})
            self._absent.difference_update(missing)

    # ---------------------------------------------------------------- what transports use

    async def endpoints(self) -> list[EngineEndpoint]:
        """EngineError unless the engine is paused: SGLang would wait for running requests."""
        setup = self._ready()
        if Memory.WEIGHTS in self._absent or not self._paused:
            raise EngineError(f"{self._name}: new weights need a paused engine that is awake; call pause first.")
        self._weights.expect()
        return [
            EngineEndpoint(
                index=setup.index,
                url=server.address,
                token=server.token,
                num_ranks=self._features.tp_size * self._features.pp_size,
                incarnation=self._incarnation,
            )
            for server in self._fleet.servers
        ]

    async def weights_sent(self, version: int) -> None:
        """A transport has brought all of a version, and told the servers its number."""
        self._ready()
        await self._weights.complete(version)

    async def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The same call to every server of the engine, with its token and the control timeout; answers by server."""
        self._ready()
        return await self._fleet.post(path, body)


def expert_sizes(config: SglangOptions, setup: EngineSetup) -> ExpertSizes:
    """EngineError where servers cannot be asked which experts they chose."""
    if problem := problem_of_experts(config):
        raise EngineError(f"engine {setup.index}: {problem}")
    sizes = ExpertSizes.of(setup.model_path)
    if setup.device == "cpu" and not config.external_engine_addrs and not in_source(UNPINNED_EXPERTS):
        raise EngineError(
            f"engine {setup.index}: the SGLang that is installed pins the memory for expert ids "
            "(train.use_rollout_routing_replay), which takes a GPU; 0.5.20 does not."
        )
    return sizes
