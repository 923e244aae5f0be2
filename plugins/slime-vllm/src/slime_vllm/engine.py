"""VllmEngine: the engine contract over one or several vLLM servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from slime_core.contracts.engine import Capability, MemoryTag
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_serving.engine import ServingEngine
from slime_serving.in_flight import RequestsInFlight
from slime_transports.receiver import ServerEndpoint
from slime_vllm.config import VllmOptions
from slime_vllm.connection import VllmConnection
from slime_vllm.held_weights import VllmWeights
from slime_vllm.receiver import VllmReceiver
from slime_vllm.requests import VllmRequests
from slime_vllm.scoring import VllmScorer
from slime_vllm.server_group import VllmServers

CAPABILITIES = frozenset({Capability.VERSION_SPANS, Capability.SCORES})


class VllmEngine(ServingEngine[VllmServers]):
    """For new weights running requests are aborted and continue as new ones with the tokens so far, whose keys and values the
    new weights compute: every token's version is exact.

    Log-probs are those of the distribution that was sampled from (`processed_logprobs`), except if 0 < min_new_tokens <
    max_new_tokens: then vLLM removes the end tokens from the first tokens' distribution.
    """

    endpoint: ClassVar[Callable[..., EngineEndpoint]] = partial(ServerEndpoint, receiver=VllmReceiver)

    def __init__(self, config: VllmOptions) -> None:
        super().__init__("vllm", VllmServers(config))
        self._config = config
        self._scores = VllmScorer(self._fleet, timeout_s=config.request_timeout)

    async def prepare(self, setup: EngineSetup) -> None:
        own = not self._config.external_engine_addrs
        weights = self._held = VllmWeights(self._fleet, setup, shared=own)
        await self._fleet.post("/init_weight_transfer_engine", {"init_info": {}})
        self._requests = RequestsInFlight(
            self._fleet,
            VllmRequests.of(setup, has_priorities=getattr(self._config, "scheduling_policy", None) == "priority"),
            setup,
            expected_version=lambda: weights.given,
            request_timeout_s=self._config.request_timeout,
            control_timeout_s=self._config.control_timeout,
        )

    def capabilities(self, setup: EngineSetup) -> frozenset[Capability]:
        return CAPABILITIES

    @property
    def entrance(self) -> VllmConnection:
        return self._fleet.servers[0]

    @property
    def ranks_of_server(self) -> int:
        setup = self._ready()
        return setup.num_devices // self._config.servers

    async def health(self) -> None:
        """vLLM's health route fails when its engine process has died."""
        self._ready()
        try:
            await self._fleet.ask_health("/health")
        except EngineError:
            self._ready()
            raise

    async def pause_servers(self, in_flight: RequestsInFlight) -> None:
        await in_flight.interrupt()
        await self._fleet.post("/pause?mode=abort", {})

    async def resume_servers(self) -> None:
        await self._fleet.post("/resume", {})

    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None:
        raise EngineRefused(f"{self._name}: slime-vllm does not release the memory of its servers.")

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Nothing is released."""
        self._ready()
