"""Errors of a search. They are not the fault of the sample, which is retried or fails. It is never trained as if the search
had found nothing."""

from __future__ import annotations


class RetrievalUnavailable(ConnectionError):
    """The server cannot be reached, fails, or sends an invalid response."""


class RetrievalTimeout(TimeoutError):
    """The server sent no response in time."""
