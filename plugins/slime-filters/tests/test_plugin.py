import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.contracts.filter import BufferFilter, BufferFilterDriver, FilterDriver, GroupFilter
from slime_filters.plugin import Length, NonzeroStd, PassRateBand, Priority

KINDS = {
    "nonzero_std": (FilterDriver, GroupFilter, {}),
    "pass_rate_band": (FilterDriver, GroupFilter, {}),
    "length": (FilterDriver, GroupFilter, {"max_response_len": 8}),
    "overlong_filter": (FilterDriver, GroupFilter, {}),
    "priority": (BufferFilterDriver, BufferFilter, {}),
    "fresh_first": (BufferFilterDriver, BufferFilter, {}),
    "oldest_first": (BufferFilterDriver, BufferFilter, {"max_behind": 2}),
}


@pytest.mark.parametrize("name", KINDS)
def test_entry_points_resolve_and_build(name: str) -> None:
    driver_kind, kind, options = KINDS[name]
    driver = entry_points(group="slime.filters")[name].load()
    config = driver.Config(**options)
    assert issubclass(driver, driver_kind)
    assert driver.api_version == API_VERSION
    assert isinstance(driver.build(config), kind)
    assert driver.Config.model_validate_json(config.model_dump_json()) == config
    assert all(field.description for field in driver.Config.model_fields.values())
    with pytest.raises(ValidationError, match="extra"):
        driver.Config(**options, threshold=1)


@pytest.mark.parametrize(
    ("driver", "options", "match"),
    [
        (NonzeroStd, {"min_std": -1}, "min_std"),
        (NonzeroStd, {"min_std": float("nan")}, "min_std"),
        (PassRateBand, {"min_pass_rate": 0.6, "max_pass_rate": 0.5}, "nothing would pass"),
        (PassRateBand, {"max_pass_rate": 1.5}, "max_pass_rate"),
        (Length, {}, "nothing would be dropped"),
        (Length, {"min_response_len": 9, "max_response_len": 8}, "nothing would pass"),
        (Priority, {"key": ""}, "key"),
    ],
)
def test_impossible_options_are_refused(driver, options, match) -> None:
    with pytest.raises(ValidationError, match=match):
        driver.Config(**options)


def test_listing_imports_nothing_heavy() -> None:
    code = "import sys, slime_filters.plugin; print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
