"""Served: what engines and middlewares say of the requests that they served, for the record of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from statistics import fmean

from slime_core.contracts.middleware import RouterMiddleware
from slime_core.types.completion import Completion, GenerateRequest


class Served:
    """Counts until the next `take`. Metrics are of what was served while a step was under way, which with rollouts ahead
    is not what it trains on, and are lost with the process: so they are named as measurements of speed are."""

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._cached_tokens = 0
        self._extra: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, request: GenerateRequest, completion: Completion) -> None:
        self._requests += 1
        self._prompt_tokens += len(request.token_ids)
        self._cached_tokens += completion.cached_tokens
        for name, value in completion.extra.items():
            self._extra[name].append(value)

    def take(self) -> dict[str, float]:
        """Shares and means over requests; of `Completion.extra` over the requests that have it."""
        metrics: dict[str, float] = {}
        if self._requests:
            metrics["perf/served_requests"] = float(self._requests)
            metrics["perf/prefix_cache_hit_rate"] = self._cached_tokens / max(self._prompt_tokens, 1)
            metrics["perf/cached_tokens_per_request"] = self._cached_tokens / self._requests
        metrics |= {f"perf/{name}": fmean(values) for name, values in self._extra.items()}
        self._requests = self._prompt_tokens = self._cached_tokens = 0
        self._extra.clear()
        return metrics


def middleware_metrics(middlewares: Mapping[str, RouterMiddleware]) -> dict[str, float]:
    """Their counters since the start, by name."""
    return {
        f"perf/router/{name}/{counter}": float(value)
        for name, middleware in middlewares.items()
        for counter, value in middleware.metrics().items()
        if isinstance(value, Real)
    }
