"""load_balance: the engine with the least work in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.contracts.middleware import Next, RouterMiddleware

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest


class LeastLoad(RouterMiddleware):
    """Sorts `request.engines` by load; engines with equal load keep their order. Counts only requests through this
    middleware, not those that other clients send to the same engines."""

    def __init__(self, *, in_tokens: bool) -> None:
        self._in_tokens = in_tokens
        self._load: Counter[int] = Counter()

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        if not request.engines:
            return await call_next(request)
        engines = tuple(sorted(request.engines, key=self._load.__getitem__))
        work = len(request.token_ids) + request.sampling.max_new_tokens if self._in_tokens else 1
        # The request goes to the first engine, unless that is full: then to one that is nearly full.
        engine = engines[0]
        self._load[engine] += work
        try:
            return await call_next(replace(request, engines=engines))
        finally:
            self._load[engine] -= work
            if not self._load[engine]:
                del self._load[engine]

    def metrics(self) -> Mapping[str, Any]:
        """Load in flight, of each engine that has any."""
        return {f"load_{engine}": load for engine, load in sorted(self._load.items())}
