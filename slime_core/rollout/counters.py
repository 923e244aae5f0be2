"""Counters of middlewares, as metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from slime_core.contracts.middleware import RouterMiddleware
from slime_core.registry.boundary import foreign


def middleware_metrics(middlewares: Mapping[str, RouterMiddleware]) -> dict[str, float]:
    """Counters since the start, by name; requests of later steps and of evaluations are included."""
    metrics: dict[str, float] = {}
    for name, middleware in middlewares.items():
        with foreign(middleware, "metrics"):
            counters = middleware.metrics().items()
            metrics |= {f"perf/router/{name}/{key}": float(value) for key, value in counters if isinstance(value, Real)}
    return metrics
