"""NotThere: what is asked for does not exist, while its place can be read."""

from __future__ import annotations

from slime_core.errors import DataError


class NotThere(DataError):
    """No such run, set, step, sample or panel."""
