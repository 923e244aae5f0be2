"""Options of the middlewares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


class LoadBalanceConfig(DriverConfig):
    measure: Literal["tokens", "requests"] = "tokens"
    """What an engine's load is: the tokens that its running requests have and may still get, or their number."""


class SessionAffinityConfig(DriverConfig):
    strict: bool = False
    """Wait for the session's engine while it is full, instead of taking another one."""
    max_sessions: int = Field(100_000, gt=0)
    """Sessions that are remembered; beyond that the one that asked longest ago is forgotten."""


class PriorityConfig(DriverConfig):
    concurrency: int = Field(512, gt=0)
    """Requests let through at a time; the rest wait here, in order. The engines' own bound or less: what waits behind
    this queue is no longer sorted."""
    levels: dict[str, int] = Field(default_factory=dict)
    """Priority by how a request's id begins, added to the one it brings along; the longest match counts. The ids of a
    run begin with `train/` or `eval-NAME/`."""
    max_waiting: int | None = Field(None, gt=0)
    """More waiting requests than this are turned away; by default any number waits."""


class RateLimitConfig(DriverConfig):
    requests_per_second: float = Field(1000.0, gt=0, allow_inf_nan=False)
    """Over time."""
    burst: int = Field(100, gt=0)
    """Requests that may come at once after a quiet time."""
    max_wait_s: float = Field(60.0, ge=0, allow_inf_nan=False)
    """Seconds that a request waits for its turn at most; one that would wait longer is turned away at once."""


class RetryConfig(DriverConfig):
    attempts: int = Field(3, gt=1)
    """Times that a request is sent at most."""
    backoff_s: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Seconds before the second attempt, at most; doubled for each further one. The actual wait is drawn from 0 up to
    that, so that requests that failed together do not come back together."""
    max_backoff_s: float = Field(5.0, ge=0, allow_inf_nan=False)
    """Seconds between two attempts, at most."""
    deadline_s: float = Field(120.0, gt=0, allow_inf_nan=False)
    """No attempt is begun later than this many seconds after the first one."""


class RecordConfig(DriverConfig):
    path: RunPath
    """File of recorded answers, one line of JSON each."""
    mode: Literal["record", "replay"] = "record"
    """`record` adds every answer to the file; `replay` answers from it, and no engine is asked."""
    on_missing: Literal["error", "forward"] = "error"
    """While replaying, of a request that was not recorded: an error, or the engine's work."""


class RadixCacheConfig(DriverConfig):
    tokenizer: RunPath
    """Folder with the model's tokenizer.json; it is asked for text that no engine has seen or written."""
    max_bytes: int = Field(2**30, gt=0)
    """Memory for conversations; beyond that the least recently used are forgotten."""
    keep_versions: int = Field(5, gt=0)
    """A conversation that was not used since the policy was this many versions older is forgotten."""
