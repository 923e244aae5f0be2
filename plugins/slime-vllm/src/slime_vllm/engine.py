"""VllmEngine: the engine contract over one or several vLLM servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

from slime_core.contracts.engine import Capability, MemoryTag
from slime_core.contracts.setup import EngineEndpoint, EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_serving.adapter_options import problem_of_offload
from slime_serving.engine import ServingEngine
from slime_serving.in_flight import RequestsInFlight
from slime_transports.receiver import ServerEndpoint
from slime_vllm.config import VllmOptions
from slime_vllm.connection import VllmConnection
from slime_vllm.features import Features
from slime_vllm.held_weights import VllmWeights
from slime_vllm.images import SentImages
from slime_vllm.option_checks import problem_of_device
from slime_vllm.receiver import VllmReceiver
from slime_vllm.requests import VllmRequests
from slime_vllm.scoring import VllmScorer
from slime_vllm.served_adapters import VllmAdapters
from slime_vllm.server_group import VllmServers

CAPABILITIES = frozenset({Capability.VERSION_SPANS, Capability.SCORES, Capability.HTTP, Capability.REPETITION_PENALTY})
ASLEEP: Final[Mapping[MemoryTag, str]] = {MemoryTag.WEIGHTS: "weights", MemoryTag.KV_CACHE: "kv_cache"}
"""vLLM's names of what it wakes up one by one. Its graphs wake up with either."""


class VllmEngine(ServingEngine[VllmServers]):
    """`engine.pause_mode` sets how running requests wait for new weights. vLLM reports the version of each token.

    Log-probs are those of the distribution that was sampled from (`processed_logprobs`), except if 0 < min_new_tokens <
    max_new_tokens: then vLLM removes the end tokens from the first tokens' distribution.
    """

    endpoint: ClassVar[Callable[..., EngineEndpoint]] = partial(ServerEndpoint, receiver=VllmReceiver)

    def __init__(self, config: VllmOptions) -> None:
        super().__init__("vllm", VllmServers(config))
        self._config = config
        self._features: Features | None = None
        self._images: SentImages | None = None
        self._scores = VllmScorer(self._fleet, timeout_s=config.request_timeout)

    def check_setup(self, setup: EngineSetup) -> None:
        problem = problem_of_device(self._config, setup.device)
        if problem := problem or problem_of_offload(self._config, offload=setup.offload):
            raise EngineError(f"engine {setup.index}: {problem}")

    async def prepare(self, setup: EngineSetup) -> None:
        own = not self._config.external_engine_addrs
        features = self._features = await Features.of_all(self._fleet.servers, self._config, setup)
        weights = self._held = VllmWeights(self._fleet, setup, shared=own)
        # vLLM processes images with the tokenizer.
        self._images = SentImages.of(setup) if features.tokenizer else None
        exact = self._config.pause_mode == "abort"
        if self._config.most_adapters:
            folder = setup.run_dir / "adapters" / f"{setup.index}-{self._incarnation}"
            self._adapters = VllmAdapters(self._fleet, self._config, folder, setup)
        await self._fleet.post("/init_weight_transfer_engine", {"init_info": {}})
        self._requests = RequestsInFlight(
            self._fleet,
            VllmRequests.of(
                setup,
                features,
                images=self._images,
                pause_mode=self._config.pause_mode,
                adapters=self._adapters,
            ),
            setup,
            # In the other modes weights change while requests run.
            expected_version=lambda: weights.given if exact else None,
            request_timeout_s=self._config.request_timeout,
            control_timeout_s=self._config.control_timeout,
        )

    def capabilities(self, setup: EngineSetup) -> frozenset[Capability]:
        offered = set(CAPABILITIES)
        if setup.device == "cpu" or (setup.offload and not self._config.external_engine_addrs):
            offered.add(Capability.SLEEP)
        if self._features is not None and self._features.guided_decoding:
            offered.add(Capability.STRUCTURAL_TAG)
        if self._images is not None and self._config.pause_mode == "abort":
            offered.add(Capability.IMAGES)
        if self._adapters is not None:
            offered.add(Capability.ADAPTERS)
        return frozenset(offered)

    @property
    def entrance(self) -> VllmConnection:
        return self._fleet.servers[0]

    @property
    def ranks_of_server(self) -> int:
        self._ready()
        assert self._features is not None
        return self._features.ranks

    async def health(self) -> None:
        """vLLM's health route notices a dead engine process only; that process itself responds to the other one."""
        self._ready()
        try:
            await self._fleet.ask_health("/health")
            await self._fleet.ask_health(self._fleet.version_path)
        except EngineError:
            self._ready()
            raise

    async def pause_servers(self, in_flight: RequestsInFlight) -> None:
        """See `engine.pause_mode`."""
        if self._config.pause_mode == "abort":
            await in_flight.interrupt()
            await self._fleet.post("/pause?mode=abort", {})
        else:
            # With clear_cache, vLLM would compute the keys and values of waiting requests again.
            await self._fleet.post("/pause?mode=keep&clear_cache=false", {})

    async def resume_servers(self) -> None:
        await self._fleet.post("/resume", {})

    async def release(self, tags: Sequence[MemoryTag] | None) -> None:
        """Releases vLLM's memory of `tags`; see `engine.sleep_level` for the weights."""
        setup = self._ready()
        running = 0 if self._requests is None else len(self._requests)
        gone = [tag for tag in (MemoryTag if tags is None else tags) if tag not in self._absent]
        if not gone:
            return
        if running and not (self._paused and self._config.pause_mode == "abort"):
            raise EngineRefused(f"{self._name}: sleep while {running} requests run. Abort them first.")
        if MemoryTag.WEIGHTS in gone:
            # It releases keys and values too, and cannot keep them.
            # The transport `frozen` sends nothing.
            level = self._config.sleep_level if setup.transport not in (None, "frozen") else 1
            if level == 2 and self._held is not None:
                self._dropped = True
                self._drops += 1
                self._held.expect()
            await self._fleet.post(f"/sleep?level={level}&mode=abort", {})
            gone = list(MemoryTag)
        elif MemoryTag.KV_CACHE in gone:
            await self._fleet.post("/pause?mode=abort", {})
            if setup.device != "cpu":
                await self._fleet.post("/release_kv_cache_memory", {})
        self._absent.update(gone)

    async def restore(self, tags: Sequence[MemoryTag] | None) -> None:
        """Allocates the memory of `tags` again; None: all. With all of it vLLM schedules requests again; while the engine is
        paused none are sent."""
        self._ready()
        missing = [tag for tag in (MemoryTag if tags is None else tags) if tag in self._absent]
        named = [f"tags={ASLEEP[tag]}" for tag in missing if tag in ASLEEP]
        if named:
            await self._fleet.post(f"/wake_up?{'&'.join(named)}", {})
        self._absent.difference_update(missing)
