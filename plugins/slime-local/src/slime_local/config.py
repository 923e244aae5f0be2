"""Options of the embedded engine, what it can do, and options of the transport `direct`. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import Capability

CAPABILITIES: Final = frozenset(
    {
        Capability.DETERMINISTIC,
        Capability.VERSION_SPANS,
        Capability.SLEEP,
        Capability.SCORES,
        Capability.CHECKSUM,
        Capability.REPLAY,
        Capability.REPETITION_PENALTY,
    }
)
"""Capabilities of every embedded engine, with any options."""


class LocalConfig(DriverConfig):
    max_running: int = Field(default=1024, ge=1)
    """Sequences decoded at once at most; the others wait in order of arrival. The run's own bound on sequences in
    flight and `kv_cache_bytes` hold as well. A small model on a CPU gains up to some thousands, since a step's own cost is
    most of it; others hardly change above 256."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, that one step computes at most for newly admitted prompts; a longer prompt is computed
    alone. It bounds how long a step holds the event loop."""
    kv_cache_bytes: int = Field(default=4 * 2**30, ge=1)
    """Keys and values of all running sequences at their longest, in bytes; a sequence waits while it would not fit
    beside the others. One sequence always runs. Memory is taken as needed, with room to grow: up to twice this."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and KV cache; buckets must have the same. `auto`: bfloat16 on a GPU and float32 on a CPU, which
    is what trainers compute in there and send, whatever the model folder is stored in."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Kernel of the linear layers on a CPU in float32. `torch` is what transformers runs; `onednn` measured twice as
    fast on AMD processors and as exact, but its sums are added in another order. `auto`: oneDNN where torch has it."""

    max_adapters: int | None = Field(default=None, ge=0)
    """LoRA adapters that it holds at a time beside its weights, for a loop of one's own (`Adapter.snapshot`); 0: none. By
    default 64."""

    @property
    def most_adapters(self) -> int:
        return 64 if self.max_adapters is None else self.max_adapters

    threads: int = Field(default=0, ge=0)
    """CPU threads of an operation. 0: for models of under ten million parameters one, and the rows of a decode step are
    divided among as many threads as torch has; else torch's own number."""


class DirectConfig(DriverConfig):
    update_weight_buffer_size: int = Field(default=512 * 2**20, ge=1)
    """Bytes per bucket. Two buckets are alive at a time: one is loaded while the next is exported."""
    check_weight_update_equal: bool = False
    """Compare the checksum over all weights between the engines after each push."""
