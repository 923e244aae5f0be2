"""Errors of the router, in addition to the kernel's."""

from __future__ import annotations

from slime_core.errors import EngineError, EngineUnavailable


class TooManyRequests(EngineUnavailable):
    """The rate limit is exceeded; the request may be sent again after `retry_after_s` seconds."""

    def __init__(self, text: str, *, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class BadRequest(EngineError):
    """The request cannot be parsed, or asks for something unsupported; sending it again does not help."""


class BadResponse(EngineError):
    """The engine's response cannot be parsed."""


class Refused(EngineError):
    """The engine responded with an error of its own, which the caller gets unchanged."""

    def __init__(self, text: str, *, status: int, body: bytes, content_type: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = body
        self.content_type = content_type
