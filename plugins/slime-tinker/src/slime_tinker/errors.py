"""Errors that a client of the server gets. The SDK raises what a future failed with as RequestFailedError, and other statuses
as its own classes (BadRequestError, NotFoundError, ...)."""

from __future__ import annotations

from slime_core.errors import SlimeError


class RequestError(SlimeError):
    """What is wrong with a request: the field, what it holds, and what it may hold. The client has to change it."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        """`status`: of the HTTP response, where the request has no future that could fail."""
        super().__init__(message)
        self.status = status


class SkippedStep(RequestError):
    """An optimizer step changed nothing, and dropped its gradients."""


def not_found(what: str) -> RequestError:
    return RequestError(what, status=404)
