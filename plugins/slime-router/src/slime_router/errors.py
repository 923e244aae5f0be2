"""What a router may tell its caller beside the kernel's errors."""

from __future__ import annotations

from slime_core.errors import EngineError, EngineUnavailable


class TooManyRequests(EngineUnavailable):
    """More than was agreed on; it may be sent again later."""

    def __init__(self, text: str, *, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class BadRequest(EngineError):
    """The request cannot be understood, or asks for what cannot be had; sending it again does not help."""


class BadAnswer(EngineError):
    """The engine answered with something that is no answer."""


class Refused(EngineError):
    """The engine answered with an error of its own, which the caller gets as it is."""

    def __init__(self, text: str, *, status: int, body: bytes, content_type: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = body
        self.content_type = content_type
