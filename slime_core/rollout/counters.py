"""Counters of middlewares, as metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from slime_core.contracts.middleware import RouterMiddleware


def middleware_metrics(middlewares: Mapping[str, RouterMiddleware]) -> dict[str, float]:
    """Counters since the start, by name; requests of later steps and of evaluations are included."""
    return {
        f"perf/router/{name}/{counter}": float(value)
        for name, middleware in middlewares.items()
        for counter, value in middleware.metrics().items()
        if isinstance(value, Real)
    }
