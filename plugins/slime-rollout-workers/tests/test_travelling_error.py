"""What an error costs that many requests raise."""

from __future__ import annotations

import pickle

from slime_core.errors import EngineError
from slime_rollout_workers.travelling_error import packed, raised_here

TIMES = 30


class Unreadable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def require_equal_sizes(error: Exception) -> None:
    size = len(pickle.dumps(packed(error)))
    assert size < 1000
    for _ in range(TIMES):
        assert len(pickle.dumps(packed(error))) == size


def test_an_error_that_is_packed_again_and_again_is_no_larger():
    """The engine client raises the same one for every request in flight."""
    error = EngineError("engines were restarted too often")
    error.add_note("of its own")
    require_equal_sizes(error)
    assert error.__notes__ == ["of its own"]
    arrived = raised_here(pickle.loads(pickle.dumps(packed(error))))  # noqa: S301 - made here
    assert arrived.__notes__ == ["of its own"]
    assert str(arrived.__cause__).count("engines were restarted too often") == 1
    # Those of one message are several objects.
    assert packed(error) is not packed(error)


def test_one_that_cannot_be_read_is_no_larger_either():
    require_equal_sizes(Unreadable(1, 2))


def fail(error: Exception) -> None:
    raise error


def test_the_traceback_of_an_error_that_is_raised_again_has_an_end():
    """Later requests raise it too, and each adds its lines."""
    error, sizes = EngineError("engines were restarted too often"), []
    for _ in range(5 * TIMES):
        try:
            fail(error)
        except EngineError as raised:
            sizes.append(len(pickle.dumps(packed(raised))))
            assert sizes[-1] < 10_000
    assert set(sizes[TIMES:]) == {sizes[-1]}
