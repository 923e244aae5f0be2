"""session_affinity: a conversation stays on one engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.contracts.middleware import Next, RouterMiddleware

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest


class StickySessions(RouterMiddleware):
    """Puts the engine that served a session's latest request first. The first request of a session, and one whose engine
    has been removed, keep their order of engines."""

    def __init__(self, *, strict: bool, max_sessions: int) -> None:
        self._strict = strict
        self._max_sessions = max_sessions
        self._engine_of: OrderedDict[str, int] = OrderedDict()
        self._kept = 0
        self._moved = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        session = request.session_id
        if session is None or not request.engines:
            return await call_next(request)
        engine = self._engine_of.get(session)
        if engine in request.engines:
            others = () if self._strict else tuple(other for other in request.engines if other != engine)
            request = replace(request, engines=(engine, *others))
        completion = await call_next(request)
        if engine is not None:
            self._kept += completion.engine_index == engine
            self._moved += completion.engine_index != engine
        self._engine_of[session] = completion.engine_index
        self._engine_of.move_to_end(session)
        if len(self._engine_of) > self._max_sessions:
            self._engine_of.popitem(last=False)
        return completion

    def metrics(self) -> Mapping[str, Any]:
        return {"sessions": len(self._engine_of), "kept": self._kept, "moved": self._moved}
