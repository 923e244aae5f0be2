"""Drivers of `engine.name = "local"` and `sync.transport = "direct"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.contracts.transport import TransportDriver
from slime_local.config import CAPABILITIES, DirectConfig, LocalConfig
from slime_training.adapters.drivers import AdapterSampler
from slime_training.memory_plan import EnginePlanner, TransportPlanner

if TYPE_CHECKING:
    from slime_local.direct import DirectTransport
    from slime_local.engine import LocalEngine
    from slime_training.memory_plan import EngineLoad, EngineMemory, TransportMemory


class Local(EnginePlanner, AdapterSampler, EngineDriver):
    """The embedded engine: continuous batching over a transformers model in this process, on a CPU or one GPU."""

    Config = LocalConfig
    transports: ClassVar[tuple[str, ...]] = ("direct",)
    optional_capabilities: ClassVar[frozenset[Capability]] = CAPABILITIES | {
        Capability.IMAGES,
        Capability.VIDEOS,
        Capability.BATCH_INVARIANT,
        Capability.TRUE_ON_POLICY,
        Capability.ADAPTERS,
    }

    @classmethod
    def max_adapters(cls, config: LocalConfig) -> int:
        return config.most_adapters

    @classmethod
    def memory(cls, config: LocalConfig, load: EngineLoad) -> EngineMemory:
        from slime_local.memory import engine_memory

        return engine_memory(config, load)

    @classmethod
    def build(cls, config: LocalConfig) -> LocalEngine:
        from slime_local.engine import LocalEngine

        return LocalEngine(config)


class Direct(TransportPlanner, TransportDriver):
    """Hands the exporter's buckets to the engines: in process as they are, under Ray through shared memory."""

    Config = DirectConfig
    serves: ClassVar[tuple[str, ...]] = ("local", "sglang")

    @classmethod
    def problems(cls, config: DirectConfig, engine: Any) -> list[str]:
        if not getattr(engine, "keeps_weights", False):
            return []
        return [
            f"engine.max_adapters = {engine.max_adapters}: servers with adapters keep the weights of their folder. Pass "
            "--transport frozen."
        ]

    @classmethod
    def memory(cls, config: DirectConfig, num_bytes: int) -> TransportMemory:
        from slime_local.memory import bucket_memory

        return bucket_memory(config, num_bytes)

    @classmethod
    def build(cls, config: DirectConfig) -> DirectTransport:
        from slime_local.direct import DirectTransport

        return DirectTransport(config)
