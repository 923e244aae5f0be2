"""Prometheus metrics of GET /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slime_core.contracts.middleware import RouterMiddleware
from slime_router.server.upstreams import Upstreams

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Metrics of this router, in a registry of its own and not the process's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "slime_router_"
        self._requests = Counter(
            name + "requests", "Requests with a response, by status.", ["status"], registry=self.registry
        )
        self._seconds = Histogram(
            name + "request_seconds", "From the first byte to the last.", buckets=SECONDS, registry=self.registry
        )
        self.in_flight = Gauge(name + "in_flight", "Requests being served.", registry=self.registry)

    def count(self, status: int, seconds: float) -> None:
        self._requests.labels(status).inc()
        self._seconds.observe(seconds)


class UpstreamCollector(Collector):
    """Collects the upstreams' counters when /metrics is read."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams

    def collect(self) -> Iterable[Metric]:
        name = "slime_router_upstream_"
        up = GaugeMetricFamily(name + "up", "1 = can be reached.", labels=["url"])
        in_flight = GaugeMetricFamily(name + "in_flight", "Requests that it is serving.", labels=["url"])
        sent = CounterMetricFamily(name + "requests", "Requests sent to it.", labels=["url"])
        failed = CounterMetricFamily(name + "failures", "Requests without a response from it.", labels=["url"])
        for upstream in self._upstreams:
            up.add_metric([upstream.url], upstream.up)
            in_flight.add_metric([upstream.url], upstream.in_flight)
            sent.add_metric([upstream.url], upstream.sent)
            failed.add_metric([upstream.url], upstream.failed)
        return up, in_flight, sent, failed


class MiddlewareCollector(Collector):
    """The middlewares' own counters."""

    def __init__(self, middlewares: Mapping[str, Sequence[RouterMiddleware]]) -> None:
        self._middlewares = middlewares

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "slime_router_middleware", "Counters of the middlewares.", labels=["middleware", "place", "counter"]
        )
        for name, group in self._middlewares.items():
            for place, middleware in enumerate(group):
                for counter, value in middleware.metrics().items():
                    family.add_metric([name, str(place), counter], float(value))
        return (family,)
