"""RouterMiddleware: handles every generate request before an engine gets it, and its completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest

Next: TypeAlias = "Callable[[GenerateRequest], Awaitable[Completion]]"


class RouterMiddleware(ABC):
    """Named in `router.middlewares`, outermost first. One instance serves all requests of a run.

    A middleware that chooses engines calls `call_next` with `engines` reordered or reduced (`dataclasses.replace`). It changes
    neither tokens, sampling nor seed, stops when it is cancelled, and does not catch errors: only after EngineUnavailable
    may the same request be sent again.
    """

    @abstractmethod
    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        """Returns the completion of `request`. call_next: passes a request to the next middleware or to an engine."""

    def metrics(self) -> Mapping[str, Any]:
        """Counters since the start of the run, by metric name."""
        return {}


class MiddlewareDriver(Driver[RouterMiddleware]):
    """Chosen by router.middlewares."""
