"""Options of the middlewares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


class LoadBalanceConfig(DriverConfig):
    measure: Literal["tokens", "requests"] = "tokens"
    """How the load of an engine is measured: tokens of its running requests (present and still possible), or their number."""


class SessionAffinityConfig(DriverConfig):
    strict: bool = False
    """Wait for the session's engine while it is full, instead of taking another one."""
    max_sessions: int = Field(100_000, gt=0)
    """Maximum number of sessions kept; beyond that the least recently used one is removed."""


class PriorityConfig(DriverConfig):
    concurrency: int = Field(512, gt=0)
    """Requests forwarded at a time; the others wait here, in order. Set at most the engines' own limit: requests that wait
    in the engines are no longer sorted."""
    levels: dict[str, int] = Field(default_factory=dict)
    """Priority by the beginning of a request's id, added to the request's own priority; the longest match counts. The ids
    of a run begin with `train/` or `eval-NAME/`."""
    max_waiting: int | None = Field(None, gt=0)
    """Maximum number of waiting requests; further ones are refused. None: no limit."""


class RateLimitConfig(DriverConfig):
    requests_per_second: float = Field(1000.0, gt=0, allow_inf_nan=False)
    """Average rate over time."""
    burst: int = Field(100, gt=0)
    """Requests that may come at once after an idle time."""
    max_wait_s: float = Field(60.0, ge=0, allow_inf_nan=False)
    """Maximum seconds that a request waits; one that would wait longer is refused at once."""


class RetryConfig(DriverConfig):
    attempts: int = Field(3, gt=1)
    """Maximum number of times that a request is sent."""
    backoff_s: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Maximum seconds before the second attempt; doubled for each further one. The actual wait is random between 0 and
    this, so that requests that failed together are not sent again together."""
    max_backoff_s: float = Field(5.0, ge=0, allow_inf_nan=False)
    """Maximum seconds between two attempts."""
    deadline_s: float = Field(120.0, gt=0, allow_inf_nan=False)
    """No attempt starts later than this many seconds after the first one."""


class RecordConfig(DriverConfig):
    path: RunPath
    """File of recorded responses, one line of JSON each."""
    mode: Literal["record", "replay"] = "record"
    """`record` appends every response to the file; `replay` serves from the file, without an engine."""
    on_missing: Literal["error", "forward"] = "error"
    """`replay`, for a request that was not recorded: raise an error, or forward it to an engine."""


class RadixCacheConfig(DriverConfig):
    tokenizer: RunPath
    """Folder with the model's tokenizer.json, for text whose tokens are not known yet."""
    max_bytes: int = Field(2**30, gt=0)
    """Memory limit for conversations, in bytes; beyond that the least recently used are removed."""
    keep_versions: int = Field(5, gt=0)
    """A conversation is removed if it was not used for this many policy versions."""
