"""SglangEngine: the engine contract over one or several SGLang servers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.contracts.engine import Capability, EngineInfo, MemoryTag, RolloutEngine
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.weights import Bucket
from slime_serving.in_flight import RequestsInFlight
from slime_sglang.config import SglangOptions
from slime_sglang.experts import ExpertSizes
from slime_sglang.features import Features
from slime_sglang.held_weights import HeldWeights
from slime_sglang.option_checks import problem_of_experts
from slime_sglang.requests import SglangRequests
from slime_sglang.scoring import Scorer
from slime_sglang.server.hook_table import UNPINNED_EXPERTS, in_source
from slime_sglang.server_group import ServerGroup


class SglangEngine(RolloutEngine):
    """Sends every request as one POST over a shared connection pool. While the engine is paused requests wait here, and
    those that were running are sent again with their tokens so far; `engine.pause_mode` sets other ways.

    Log-probs are those of the full vocabulary at the sampling temperature, except if 0 < min_new_tokens <
    max_new_tokens: then SGLang removes the end tokens from the first tokens' distribution.
    """

    def __init__(self, config: SglangOptions) -> None:
        self._config = config
        self._setup: EngineSetup | None = None
        self._fleet = ServerGroup(config)
        self._features = Features()
        self._requests: RequestsInFlight | None = None
        """None: a reward model, or a machine other than the engine's first."""
        self._scorer = Scorer(self._fleet, timeout_s=config.request_timeout, require_alive=self._ready)
        self._failure: EngineError | None = None
        self._incarnation = secrets.token_hex(8)
        self._paused = False
        self._pauses = 0
        self._absent: set[MemoryTag] = set()
        """Memory that is released."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Starts the servers, or connects to external ones. Raises EngineError if one dies, hangs, or has another model."""
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
        # Rewards call a reward model's server themselves.
        offered = {Capability.HTTP} if setup.reward_model else self._features.capabilities(self._config, setup)
        entrance, pid = self._fleet.entrance, self._fleet.pid
        return EngineInfo(capabilities=frozenset(offered), address=entrance.address, token=entrance.token, pid=pid)

    async def _prepare(self, setup: EngineSetup, experts: ExpertSizes | None) -> None:
        """Reads the features of the servers; builds the objects that serve requests and load weights."""
        self._features = await Features.of_all(self._fleet.servers, self._config, setup)
        weights = self._weights = HeldWeights(self._fleet, self._config, setup, self._features)
        exact = self._config.pause_mode == "abort"
        self._requests = RequestsInFlight(
            self._fleet,
            SglangRequests.of(setup, self._features, experts=experts),
            setup,
            # In the other modes weights change while requests run.
            expected_version=lambda: weights.given if exact else None,
            request_timeout_s=self._config.request_timeout,
            control_timeout_s=self._config.control_timeout,
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
        """Checks each server. Both of SGLang's health routes generate a token, so a paused or sleeping server is asked for
        its scheduler's state instead. On a machine other than the first, only the process is checked."""
        if self._ready().node_rank:
            return
        before = self._pauses
        if not (self._paused or self._absent):
            try:
                await self._fleet.ask_health("/health_generate")
                return
            except EngineError:
                self._ready()
                # A pause aborts the health check's token.
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

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Raises EngineRefused for a request that cannot be served, before any of the call runs."""
        in_flight = self._takes()
        tasks = in_flight.enter(requests)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await in_flight.leave(tasks)

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        """Yields each response when it is complete. Raises like `generate`."""
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
        """The requests in flight. Raises EngineRefused if the engine does not generate, or is asleep."""
        in_flight = self._asked()
        if self._absent:
            raise EngineRefused(f"{self._name}: generate while asleep. Call wake_up first.")
        return in_flight

    def _asked(self) -> RequestsInFlight:
        self._ready()
        if self._requests is None:
            raise EngineRefused(
                f"{self._name} is a reward model that only rewards call, or not an engine's first machine."
            )
        return self._requests

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Aborts requests; None: all. Unknown ids are ignored: they may just have ended. Returns when all have ended."""
        await self._asked().abort(request_ids)

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns the log-probs of the last tokens of each sequence, by one request per sequence, all at once."""
        self._ready()
        if self._absent:
            raise EngineRefused(f"{self._name}: score while asleep. Call wake_up first.")
        return await self._scorer.score(sequences, num_tokens)

    async def pause(self) -> None:
        """See `engine.pause_mode`. Pausing twice does nothing."""
        in_flight = self._asked()
        if self._paused:
            return
        self._paused = True
        self._pauses += 1
        in_flight.hold()
        if self._config.pause_mode == "abort":
            await in_flight.interrupt()
        await self._fleet.post("/pause_generation", {"mode": self._config.pause_mode})

    async def resume(self) -> None:
        """Raises EngineError if a version is partly loaded."""
        in_flight = self._asked()
        if self._weights.incomplete:
            raise EngineError(f"{self._name}: resume while a version is partly loaded. Send all its buckets first.")
        if not self._paused:
            return
        await self._fleet.post("/continue_generation", {})
        self._paused = False
        in_flight.resume()

    async def load_bucket(self, bucket: Bucket) -> None:
        """See `BucketOrder.check`; also EngineError while not paused, since SGLang would wait for running requests."""
        self._ready()
        if MemoryTag.WEIGHTS in self._absent or not self._paused:
            raise EngineError(f"{self._name}: load_bucket requires a paused engine that is awake. Call pause first.")
        await self._weights.load(bucket)

    async def version(self) -> int:
        """See `HeldWeights.version`."""
        self._ready()
        return await self._weights.version()

    async def checksum(self) -> str:
        """See `HeldWeights.checksum`."""
        self._ready()
        return await self._weights.checksum()

    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Releases SGLang's memory of `tags`; weights are kept on the host. Paused requests wait here, so the servers are
        idle."""
        self._ready()
        running = 0 if self._requests is None else len(self._requests)
        gone = [tag for tag in (MemoryTag if tags is None else tags) if tag not in self._absent]
        if not gone:
            return
        if running and not (self._paused and self._config.pause_mode == "abort"):
            raise EngineRefused(f"{self._name}: sleep while {running} requests run. Abort them first.")
        if MemoryTag.KV_CACHE in gone:
            await self._fleet.flush()
        await self._fleet.post("/release_memory_occupation", {"tags": gone})
        self._absent.update(gone)

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocates the memory of `tags` again; None: all."""
        self._ready()
        # SGLang crashes on a tag that it has not released.
        missing = [tag for tag in (MemoryTag if tags is None else tags) if tag in self._absent]
        if missing:
            await self._fleet.post("/resume_memory_occupation", {"tags": missing})
            self._absent.difference_update(missing)

    # ---------------------------------------------------------------- what transports use

    async def endpoints(self) -> list[EngineEndpoint]:
        """The servers, for a transport. Raises EngineError unless the engine is paused: SGLang would wait for running
        requests."""
        setup = self._ready()
        if MemoryTag.WEIGHTS in self._absent or not self._paused:
            raise EngineError(f"{self._name}: new weights require a paused engine that is awake. Call pause first.")
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

    async def commit_weights(self, version: int) -> None:
        """Called when a transport has sent all of a version and set its number on the servers."""
        self._ready()
        await self._weights.complete(version)

    async def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Sends the same call to every server of the engine, with its token and the control timeout. Returns the responses
        by server."""
        self._ready()
        return await self._fleet.post(path, body)


def expert_sizes(config: SglangOptions, setup: EngineSetup) -> ExpertSizes:
    """The expert sizes of the model. Raises EngineError if the servers cannot return expert ids."""
    if problem := problem_of_experts(config):
        raise EngineError(f"engine {setup.index}: {problem}")
    sizes = ExpertSizes.of(setup.model_path)
    if setup.device == "cpu" and not config.external_engine_addrs and not in_source(UNPINNED_EXPERTS):
        raise EngineError(
            f"engine {setup.index}: train.use_rollout_routing_replay: the installed SGLang pins the memory for expert ids, "
            "which requires a GPU. Install 0.5.20, which does not."
        )
    return sizes
