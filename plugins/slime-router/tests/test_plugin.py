"""The entry points; the contract kit's middleware suite tests the rest."""

from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core.contracts.middleware import MiddlewareDriver
from slime_router.plugin import Priority, RateLimit, Record, Retry, SessionAffinity

NAMES = {"load_balance", "priority", "radix_cache", "rate_limit", "record", "retry", "session_affinity"}


def test_entry_points():
    points = [point for point in entry_points(group="slime.middlewares") if point.dist.name == "slime-router"]
    found = {point.name: point.load() for point in points}
    assert found.keys() == NAMES
    assert all(issubclass(driver, MiddlewareDriver) for driver in found.values())


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        (Priority, {"concurrency": 0}),
        (RateLimit, {"requests_per_second": 0}),
        (RateLimit, {"requests_per_second": float("inf")}),
        (RateLimit, {"burst": 0}),
        (Retry, {"attempts": 1}),
        (Retry, {"deadline_s": 0}),
        (Record, {}),
        (Record, {"mode": "both", "path": "x"}),
        (SessionAffinity, {"max_sessions": 0}),
    ],
)
def test_impossible_options_are_refused(driver, options):
    with pytest.raises(ValidationError, match=next(iter(options), "path")):
        driver.Config(**options)
