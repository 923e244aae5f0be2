"""record: writes responses to a file, and replays them from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import DataError
from slime_router.recording import RecordingReader, RecordingWriter

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest


class Recorder(RouterMiddleware):
    """Writes every response to the file before returning it. Failed requests are not recorded."""

    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer
        self._recorded = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        completion = await call_next(request)
        self._writer.add(request, completion)
        self._recorded += 1
        return completion

    def metrics(self) -> Mapping[str, Any]:
        return {"recorded": self._recorded}


class Replayer(RouterMiddleware):
    """Returns recorded responses. Equal requests get their responses in the order of the recording."""

    def __init__(self, reader: RecordingReader, *, forward: bool) -> None:
        self._reader = reader
        self._forward = forward
        self._replayed = 0
        self._missing = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        completion = self._reader.take(request)
        if completion is not None:
            self._replayed += 1
            return completion
        self._missing += 1
        if self._forward:
            return await call_next(request)
        raise DataError(
            f"request {request.request_id}: no response to it was recorded, or all have been used. Other weights, sampling, "
            'seeds or data make other requests. Set on_missing = "forward" to send such requests to the engine.'
        )

    def metrics(self) -> Mapping[str, Any]:
        return {"replayed": self._replayed, "missing": self._missing}
