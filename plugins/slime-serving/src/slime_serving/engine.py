"""ServingEngine: the engine contract over the servers of a program such as SGLang or vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from slime_core.contracts.engine import Capability, EngineInfo, MemoryTag, RolloutEngine
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.weights import Bucket
from slime_serving.adapter_calls import AdapterCalls, Scores
from slime_serving.adapters import ServedAdapters
from slime_serving.connection import Connection
from slime_serving.held_weights import HeldWeights
from slime_serving.in_flight import RequestsInFlight
from slime_serving.server_group import ServerGroup
from slime_serving.whole_calls import WholeCalls

G = TypeVar("G", bound=ServerGroup[Any])


class ServingEngine(AdapterCalls, RolloutEngine, Generic[G]):
    """Sends every request as one POST over a shared connection pool. While the engine is paused requests wait here, and
    those that were running are sent again with their tokens so far, unless a subclass pauses in another way."""

    endpoint: ClassVar[Callable[..., EngineEndpoint]] = EngineEndpoint
    """Makes the endpoint of a server for the trainer's ranks: for slime-transports, one with how its servers take weights."""

    def __init__(self, program: str, fleet: G) -> None:
        self._program = program
        self._fleet = fleet
        self._setup: EngineSetup | None = None
        self._requests: RequestsInFlight | None = None
        """None: a reward model, or a machine other than the engine's first."""
        self._held: HeldWeights | None = None
        self._scores: Scores | None = None
        self._adapters: ServedAdapters | None = None
        """None: its servers hold no adapters."""
        self._scoring = {}
        self._failure: EngineError | None = None
        self._incarnation = secrets.token_hex(8)
        self._calls = WholeCalls()
        self._paused = False
        """The servers are paused."""
        self._pauses = 0
        self._dropped = False
        """The weights were dropped when it slept, and no new ones have begun to arrive."""
        self._drops = 0
        """How often its weights were dropped when it slept."""
        self._absent: set[MemoryTag] = set()
        """Memory that is released."""

    # ---------------------------------------------------------------- what a program's engine adds

    def check_setup(self, setup: EngineSetup) -> None:
        """Raises EngineError for a setup that its servers cannot serve, before any is started."""

    @abstractmethod
    async def prepare(self, setup: EngineSetup) -> None:
        """Sets `_requests`, `_held` and, if it has them, `_scores` and `_adapters`; the servers respond. Not called for a
        reward model, nor on a machine other than the engine's first."""

    @abstractmethod
    def capabilities(self, setup: EngineSetup) -> frozenset[Capability]: ...

    @property
    @abstractmethod
    def entrance(self) -> Connection:
        """The address that rewards and teachers call."""

    async def serve(self, setup: EngineSetup) -> None:
        """Called after `prepare`, on the engine's first machine: what else must run, such as a router."""

    @property
    @abstractmethod
    def ranks_of_server(self) -> int:
        """Processes of a server that hold weights."""

    @abstractmethod
    async def pause_servers(self, in_flight: RequestsInFlight) -> None:
        """No token is decoded afterwards. New requests are held already."""

    @abstractmethod
    async def resume_servers(self) -> None: ...

    @abstractmethod
    async def release(self, tags: Sequence[MemoryTag] | None) -> None:
        """`sleep`, on the servers."""

    @abstractmethod
    async def restore(self, tags: Sequence[MemoryTag] | None) -> None:
        """`wake_up`, on the servers."""

    # ---------------------------------------------------------------- start and end

    async def prepare_start(self, setup: EngineSetup) -> None:
        """Starts servers that import their modules and then wait, if the program can."""
        self.check_setup(setup)
        await self._fleet.prepare(setup)

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Starts the servers, or connects to external ones. Raises EngineError if one dies, hangs, or has another model."""
        if self._setup is not None:
            raise EngineError(f"engine {setup.index} has been started already.")
        self.check_setup(setup)
        self._setup = setup
        try:
            await self._fleet.start(setup)
            if not setup.node_rank:
                if not setup.reward_model:
                    await self.prepare(setup)
                await self.serve(setup)
        except BaseException as error:
            # The error that stopped the start is raised, not one of `stop`.
            try:
                await self.stop()
            except EngineError as left:
                error.add_note(str(left))
            raise
        self._fleet.watch(self._fail)
        if setup.node_rank:
            return EngineInfo(capabilities=frozenset(), pid=self._fleet.pid)
        # Rewards call a reward model's server themselves.
        offered = frozenset({Capability.HTTP}) if setup.reward_model else self.capabilities(setup)
        entrance = self.entrance
        return EngineInfo(
            capabilities=offered,
            address=entrance.address,
            token=entrance.token,
            pid=self._fleet.pid,
            start_seconds=self._fleet.start_seconds,
        )

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        if self._requests is not None:
            self._requests.fail(failure)

    async def stop(self) -> None:
        """Requests that still run fail with EngineError. Stopping twice, or before `start`, does nothing."""
        if self._failure is None and self._setup is not None:
            self._fail(EngineError(f"{self._name} was stopped."))
        async with contextlib.AsyncExitStack() as stack:
            if self._adapters is not None:
                stack.push_async_callback(self._adapters.close)
            # Without servers they end.
            stack.push_async_callback(self._calls.all_ended)
            stack.push_async_callback(self._fleet.stop)
            if self._adapters is not None and self._fleet.pid is None:
                # External servers: the next run on them would find them.
                await self._adapters.leave()

    @property
    def _name(self) -> str:
        return f"engine {self._program}" if self._setup is None else f"engine {self._setup.index}"

    @property
    def _holds_requests(self) -> bool:
        """It is paused, or about to be, or about to continue."""
        return self._requests is not None and not self._requests.is_open

    def _ready(self) -> EngineSetup:
        if self._setup is None:
            raise EngineError(f"engine {self._program}: not started; call start first.")
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
        in_flight = self._asked()
        # A server may not have a request yet: aborts are repeated, also for a caller that has gone.
        await self._calls.at_once(partial(in_flight.abort, request_ids))

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns the log-probs of the last tokens of each sequence, by one request per sequence, all at once."""
        self._ready()
        if self._absent:
            raise EngineRefused(f"{self._name}: score while asleep. Call wake_up first.")
        if self._scores is None:
            raise EngineRefused(f"{self._name}: it computes no log-probs of given tokens.")
        return await self._scores.score(sequences, num_tokens)

    async def keep_weights(self, version: int) -> None:
        """The weights of its folder are this version. For the transport `frozen`."""
        held = self._weights()
        if not self._paused:
            raise EngineError(f"{self._name}: a version requires a paused engine. Call pause first.")
        held.expect()
        await self._fleet.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        await held.complete(version)

    # ---------------------------------------------------------------- pauses and weights

    async def pause(self) -> None:
        """Pausing twice does nothing."""
        await self._calls.in_turn(self._pause)

    async def _pause(self) -> None:
        in_flight = self._asked()
        if self._paused:
            return
        self._pauses += 1
        in_flight.hold()
        await self.pause_servers(in_flight)
        self._paused = True

    async def resume(self) -> None:
        """Raises EngineRefused if the weights were dropped (`engine.sleep_level`) and none were sent since; EngineError if a
        version is partly loaded."""
        await self._calls.in_turn(self._resume)

    async def _resume(self) -> None:
        in_flight = self._asked()
        if self._dropped:
            raise EngineRefused(
                f"{self._name}: its weights were dropped when it slept, and none were sent since. Call update_weights first, "
                f"or set engine.sleep_level = 1 (--{self._program}-sleep-level 1) to keep them on the host."
            )
        if self._weights().incomplete:
            raise EngineError(f"{self._name}: resume while a version is partly loaded. Send all its buckets first.")
        # Not `_paused`: a pause that failed holds them too.
        if in_flight.is_open:
            return
        self._paused = False
        await self.resume_servers()
        in_flight.resume()

    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """See `release`."""
        await self._calls.in_turn(partial(self.release, tags))

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """See `restore`."""
        await self._calls.in_turn(partial(self.restore, tags))

    def _weights(self) -> HeldWeights:
        self._ready()
        if self._held is None:
            raise EngineRefused(f"{self._name} takes no weights.")
        return self._held

    async def load_bucket(self, bucket: Bucket) -> None:
        """Also raises EngineError while not paused, since servers would wait for running requests."""
        # To its end: servers may read it from memory that is freed afterwards.
        await self._calls.in_turn(partial(self._load_bucket, bucket))

    async def _load_bucket(self, bucket: Bucket) -> None:
        held = self._weights()
        if MemoryTag.WEIGHTS in self._absent or not self._paused:
            raise EngineError(f"{self._name}: load_bucket requires a paused engine that is awake. Call pause first.")
        self._dropped = False
        await held.load(bucket)

    async def version(self) -> int:
        """See `HeldWeights.version`."""
        return await self._weights().version()

    async def checksum(self) -> str:
        """See `HeldWeights.checksum`."""
        return await self._weights().checksum()

    # ---------------------------------------------------------------- what transports use

    async def endpoints(self) -> list[EngineEndpoint]:
        """The servers, for a transport. Raises EngineError unless the engine is paused: servers would wait for running
        requests."""
        setup, held = self._ready(), self._weights()
        if MemoryTag.WEIGHTS in self._absent or not self._paused:
            raise EngineError(f"{self._name}: new weights require a paused engine that is awake. Call pause first.")
        held.expect()
        self._dropped = False
        return [
            type(self).endpoint(
                index=setup.index,
                url=server.address,
                token=server.token,
                num_ranks=self.ranks_of_server,
                dropped=self._drops,
                incarnation=self._incarnation,
            )
            for server in self._fleet.servers
        ]

    async def commit_weights(self, version: int) -> None:
        """Called when a transport has sent all of a version and set its number on the servers."""
        await self._weights().complete(version)

    async def post(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Sends the same call to every server of the engine, with its token and the control timeout. Returns the responses
        by server."""
        self._ready()
        return await self._fleet.post(path, body)
