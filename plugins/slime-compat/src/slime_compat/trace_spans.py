"""Spans of upstream's traces, which old functions open. A run has traces of its own (debug.trace), so these record nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Span:
    def update(self, attrs: Mapping[str, Any] | None = None, **more: Any) -> None:
        return


@contextmanager
def trace_span(target: Any, name: str, **options: Any) -> Iterator[Span]:
    yield Span()


def trace_function(name: str, **options: Any) -> Callable[[F], F]:
    return lambda function: function


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {}
