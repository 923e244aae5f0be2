"""What a search may fail with. None of it says anything about the sample, which is tried again or fails; it is never
trained as if nothing had been found."""

from __future__ import annotations


class RetrievalUnavailable(ConnectionError):
    """The server is not there, is in trouble, or answers with something that is no answer."""


class RetrievalTimeout(TimeoutError):
    """The server gave no answer in time."""
