"""RouterMiddleware: sees every generate request on its way to an engine, and the answer on its way back."""

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

    A middleware that chooses engines passes the request on with `engines` reordered or narrowed (`dataclasses.replace`). It
    changes neither tokens, sampling nor seed, gives up when it is cancelled, and lets errors pass: EngineUnavailable alone
    says that the same request may be sent again.
    """

    @abstractmethod
    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion: ...

    def metrics(self) -> Mapping[str, Any]:
        """Counters since the start."""
        return {}


class MiddlewareDriver(Driver[RouterMiddleware]):
    """Chosen by router.middlewares."""
