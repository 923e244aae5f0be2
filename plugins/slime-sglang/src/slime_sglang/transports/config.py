"""Options of the transports."""

from __future__ import annotations

from pydantic import Field

from slime_core.contracts.driver import DriverConfig


class SentConfig(DriverConfig):
    update_weight_buffer_size: int = Field(default=2 * 2**30, ge=1)
    """Bytes per bucket. Two are alive at a time on the sending rank, and about two on each rank of an engine: with
    little memory to spare choose less; a 4B model came over twice as slowly in buckets of 512 MiB."""
    check_weight_update_equal: bool = False
    """After each push compare every tensor in the servers' memory with the trainer's, by checksum, of each rank the part that
    it holds; both sides read all weights to the host. That is for servers that the run starts, with weights that are not
    quantised, without pipeline stages. Others, if there are several, are only compared with one another, which
    `weights_compared` in events.jsonl says."""
    update_weights_timeout: float = Field(default=600.0, gt=0)
    """Seconds for any one call: a bucket, a file, a group."""


class IpcConfig(SentConfig):
    pass


class DistributedConfig(SentConfig):
    pass


class DiskConfig(SentConfig):
    pass


class DeltaConfig(SentConfig):
    compression_level: int = Field(default=1, ge=1, le=19)
    """Of zstd. More than 1 saves a few percent and costs several times as long."""
