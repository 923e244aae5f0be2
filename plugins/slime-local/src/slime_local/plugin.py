"""Drivers: what `engine.name = "local"` and `sync.transport = "direct"` stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.contracts.transport import TransportDriver

if TYPE_CHECKING:
    from slime_core.contracts.memory import EngineLoad, EngineMemory, TransportMemory
    from slime_local.direct import DirectTransport
    from slime_local.engine import LocalEngine


class LocalConfig(DriverConfig):
    max_running: int = Field(default=1024, ge=1)
    """Sequences decoded at once at most; the others wait in order of arrival. The run's own bound on sequences in
    flight and `kv_cache_bytes` hold as well. On a CPU the cost per token hardly changes above 256."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, that one step computes at most for newly admitted prompts; a longer prompt is computed
    alone. It bounds how long a step holds the event loop."""
    kv_cache_bytes: int = Field(default=4 * 2**30, ge=1)
    """Keys and values of all running sequences at their longest, in bytes; a sequence waits while it would not fit
    beside the others. One sequence always runs. Memory is taken as needed, with room to grow: up to twice this."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and keys and values; buckets must have the same. `auto`: bfloat16 on a GPU and float32 on a CPU, which
    is what trainers compute in there and send, whatever the model folder is stored in."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Kernel of the linear layers on a CPU in float32. `torch` is what transformers runs; `onednn` measured twice as
    fast on AMD processors and as exact, but its sums are added in another order. `auto`: oneDNN where torch has it."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of a decode step. 0: one for models of under ten million parameters, else torch's own number."""


class Local(EngineDriver):
    """The embedded engine: continuous batching over a transformers model in this process, on a CPU or one GPU."""

    Config = LocalConfig
    transports: ClassVar[tuple[str, ...]] = ("direct",)
    may_offer: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.DETERMINISTIC,
            Capability.VERSION_SPANS,
            Capability.SLEEP,
            Capability.SCORES,
            Capability.REPLAY,
            Capability.REPETITION_PENALTY,
            Capability.IMAGES,
            Capability.VIDEOS,
            Capability.BATCH_INVARIANT,
            Capability.TRUE_ON_POLICY,
        }
    )

    @classmethod
    def memory(cls, config: Any, load: EngineLoad) -> EngineMemory:
        from slime_local.memory import engine_memory

        return engine_memory(config, load)

    @classmethod
    def build(cls, config: Any) -> LocalEngine:
        from slime_local.engine import LocalEngine

        return LocalEngine(config)


class DirectConfig(DriverConfig):
    update_weight_buffer_size: int = Field(default=512 * 2**20, ge=1)
    """Bytes per bucket. Two buckets are alive at a time: one is loaded while the next is exported."""
    check_weight_update_equal: bool = False
    """Compare the checksum over all weights between the engines after each push."""


class Direct(TransportDriver):
    """Hands the exporter's buckets to the engines: in process as they are, under Ray through shared memory."""

    Config = DirectConfig
    serves: ClassVar[tuple[str, ...]] = ("local", "sglang")

    @classmethod
    def memory(cls, config: Any, num_bytes: int) -> TransportMemory:
        from slime_local.memory import bucket_memory

        return bucket_memory(config, num_bytes)

    @classmethod
    def build(cls, config: Any) -> DirectTransport:
        from slime_local.direct import DirectTransport

        return DirectTransport(config)
