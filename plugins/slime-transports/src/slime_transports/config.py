"""Options of the transports."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from slime_core.contracts.driver import DriverConfig
from slime_training.hooks import POST_WRITE_HOOKS, bind_hooks


class SentConfig(DriverConfig):
    update_weight_buffer_size: int = Field(default=2 * 2**30, ge=1)
    """Bytes per bucket. The sending rank and each rank of an engine hold about two buckets at a time. Set less if memory is
    short; with buckets of 512 MiB, sending a 4B model took twice as long."""
    check_weight_update_equal: bool = False
    """After each weight update, compare every tensor in the servers' memory with the trainer's, on each rank the part that it
    holds. With engine sglang by checksum: both sides read all weights to the host, and this requires servers that the run
    starts, with unquantized weights; others, if there are several, are only compared with one another; `weights_compared` in
    events.jsonl records which. Servers with pipeline stages are refused, because only the first stage responds. With engine
    vllm the weights are sent a second time, and servers compare what their kernels read with what they would load."""
    update_weights_timeout: float = Field(default=600.0, gt=0)
    """Seconds for each call: a bucket, a file, a group."""
    post_write_hook: dict[str, Any] | None = None
    """Function that the transports disk and delta call when a version is written, before engines load it: for files
    on a disk that shows them to other machines only then. A plugin of the group slime_training.post_write_hooks and its
    options, such as { name = "compat", path = "my.hook" } for a function of upstream slime."""

    @field_validator("post_write_hook", mode="before")
    @classmethod
    def check_hook(cls, value: Any, info: ValidationInfo) -> dict[str, Any] | None:
        return bind_hooks(POST_WRITE_HOOKS, value, where="sync.post_write_hook", base=(info.context or {}).get("base"))


class IpcConfig(SentConfig):
    pass


class DistributedConfig(SentConfig):
    pass


class DiskConfig(SentConfig):
    pass


class AdapterConfig(SentConfig):
    pass


class DeltaConfig(SentConfig):
    compression_level: int = Field(default=1, ge=1, le=19)
    """Level of zstd; with engine vllm of zlib, up to 9. Above 1 it saves a few percent and takes several times as long."""


class FrozenConfig(DriverConfig):
    pass
