"""SglangEngine: the engine contract over one or several SGLang servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from slime_core.contracts.engine import Capability, MemoryTag
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_serving.engine import ServingEngine
from slime_serving.in_flight import RequestsInFlight
from slime_serving.interpreter import Installed, program_in
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.experts import ExpertSizes
from slime_sglang.features import Features
from slime_sglang.held_weights import SglangWeights
from slime_sglang.launching import drops_weights
from slime_sglang.option_checks import problem_of_adapters, problem_of_experts
from slime_sglang.program import SGLANG
from slime_sglang.receiver import SglangReceiver
from slime_sglang.requests import SglangRequests
from slime_sglang.scoring import Scorer
from slime_sglang.served_adapters import SglangAdapters
from slime_sglang.server.hook_table import UNPINNED_EXPERTS, in_source
from slime_sglang.server_group import SglangServers
from slime_transports.receiver import ServerEndpoint


class SglangEngine(ServingEngine[SglangServers]):
    """`engine.pause_mode` sets how running requests wait for new weights.

    Log-probs are those of the full vocabulary at the sampling temperature, except if 0 < min_new_tokens <
    max_new_tokens: then SGLang removes the end tokens from the first tokens' distribution.
    """

    endpoint: ClassVar[Callable[..., EngineEndpoint]] = partial(ServerEndpoint, receiver=SglangReceiver)

    def __init__(self, config: SglangOptions) -> None:
        super().__init__("sglang", SglangServers(config))
        self._config = config
        self._features = Features()
        self._experts: ExpertSizes | None = None
        self._scores = Scorer(self._fleet, timeout_s=config.request_timeout, require_alive=self._ready)

    def check_setup(self, setup: EngineSetup) -> None:
        self._experts = expert_sizes(self._config, setup) if setup.routed_experts else None
        if self._config.most_adapters and (problem := problem_of_adapters(self._config, setup)):
            raise EngineError(f"engine {setup.index}: {problem}")

    async def prepare(self, setup: EngineSetup) -> None:
        """Reads the features of the servers; builds the objects that serve requests and load weights."""
        self._features = await Features.of_all(self._fleet.servers, self._config, setup)
        weights = self._held = SglangWeights(self._fleet, self._config, setup, self._features)
        exact = self._config.pause_mode == "abort"
        if self._config.most_adapters:
            folder = setup.run_dir / "adapters" / f"{setup.index}-{self._incarnation}"
            self._adapters = SglangAdapters(self._fleet, self._config, folder, setup)
        self._requests = RequestsInFlight(
            self._fleet,
            SglangRequests.of(setup, self._features, experts=self._experts, adapters=self._adapters),
            setup,
            # In the other modes weights change while requests run.
            expected_version=lambda: weights.given if exact else None,
            request_timeout_s=self._config.request_timeout,
            control_timeout_s=self._config.control_timeout,
        )

    async def serve(self, setup: EngineSetup) -> None:
        await self._fleet.start_router(setup)

    def capabilities(self, setup: EngineSetup) -> frozenset[Capability]:
        offered = self._features.capabilities(self._config, setup)
        if self._adapters is None:
            return offered
        # Rows of several adapters are multiplied together.
        return offered - {Capability.DETERMINISTIC, Capability.BATCH_INVARIANT} | {Capability.ADAPTERS}

    @property
    def entrance(self) -> SglangConnection:
        return self._fleet.entrance

    @property
    def ranks_of_server(self) -> int:
        return self._features.tp_size * self._features.pp_size

    async def health(self) -> None:
        """Checks each server. Both of SGLang's health routes generate a token, so a paused or sleeping server is asked for
        its scheduler's state instead. On a machine other than the first, only the process is checked."""
        if self._ready().node_rank:
            return
        before = self._pauses
        if not (self._holds_requests or self._absent):
            try:
                await self._fleet.ask_health("/health_generate")
                return
            except EngineError:
                self._ready()
                # A pause aborts the health check's token.
                if not self._holds_requests and self._pauses == before:
                    raise
        try:
            await self._fleet.ask_health("/server_info")
        except EngineError:
            self._ready()
            raise

    async def pause_servers(self, in_flight: RequestsInFlight) -> None:
        """See `engine.pause_mode`."""
        if self._config.pause_mode == "abort":
            await in_flight.interrupt()
        await self._fleet.post("/pause_generation", {"mode": self._config.pause_mode})

    async def resume_servers(self) -> None:
        await self._fleet.post("/continue_generation", {})

    async def release(self, tags: Sequence[MemoryTag] | None) -> None:
        """Releases SGLang's memory of `tags`; see `engine.sleep_level` for the weights. Paused requests wait here, so the
        servers are idle."""
        setup = self._ready()
        running = 0 if self._requests is None else len(self._requests)
        gone = [tag for tag in (MemoryTag if tags is None else tags) if tag not in self._absent]
        if not gone:
            return
        if running and not (self._paused and self._config.pause_mode == "abort"):
            raise EngineRefused(f"{self._name}: sleep while {running} requests run. Abort them first.")
        if MemoryTag.KV_CACHE in gone:
            await self._fleet.flush()
        if MemoryTag.WEIGHTS in gone and self._held is not None and drops_weights(self._config, setup):
            self._dropped = True
            self._drops += 1
            self._held.expect()
        await self._fleet.post("/release_memory_occupation", {"tags": gone})
        self._absent.update(gone)

    async def restore(self, tags: Sequence[MemoryTag] | None) -> None:
        """Allocates the memory of `tags` again; None: all."""
        self._ready()
        # SGLang crashes on a tag that it has not released.
        missing = [tag for tag in (MemoryTag if tags is None else tags) if tag in self._absent]
        if missing:
            await self._fleet.post("/resume_memory_occupation", {"tags": missing})
            self._absent.difference_update(missing)


def expert_sizes(config: SglangOptions, setup: EngineSetup) -> ExpertSizes:
    """The expert sizes of the model. Raises EngineError if the servers cannot return expert ids."""
    if problem := problem_of_experts(config):
        raise EngineError(f"engine {setup.index}: {problem}")
    sizes = ExpertSizes.of(setup.model_path)
    installed = None if config.python is None else program_in(config.python, SGLANG)
    folder = installed.folder if isinstance(installed, Installed) else None
    if setup.device == "cpu" and not config.external_engine_addrs and not in_source(UNPINNED_EXPERTS, folder):
        raise EngineError(
            f"engine {setup.index}: train.use_rollout_routing_replay: the installed SGLang pins the memory for expert ids, "
            "which requires a GPU. Install 0.5.20, which does not."
        )
    return sizes
