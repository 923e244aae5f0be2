"""What a part does when it gets no more than it declares."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from slime_core.contracts.needs import Need


@contextmanager
def with_declared_alone(needs: Collection[Need]) -> Iterator[str]:
    """Yields a label for messages; an input that is missing, and read all the same, becomes an AssertionError."""
    names = ", ".join(sorted(needs)) or "nothing"
    try:
        yield f"with {names} alone, which is what it declares"
    # What reading None, an attribute of None or a column that is not there ends in.
    except (TypeError, AttributeError, AssertionError, ValueError, KeyError) as error:
        raise AssertionError(
            f"it declares {names}, and with that alone it raises {type(error).__name__}: {error}. Declare what it reads in "
            "`needs` of its driver"
        ) from error
