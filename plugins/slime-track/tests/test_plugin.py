from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.contracts.tracker import Tracker, TrackerDriver


def test_the_entry_point_resolves_and_builds() -> None:
    driver = entry_points(group="slime.trackers")["tensorboard"].load()
    config = driver.Config(tb_project_name="p")
    assert issubclass(driver, TrackerDriver)
    assert driver.api_version == API_VERSION
    assert isinstance(driver.build(config), Tracker)
    assert driver.Config.model_validate_json(config.model_dump_json()) == config
    assert all(field.description for field in driver.Config.model_fields.values())


def test_curves_has_no_options() -> None:
    driver = entry_points(group="slime.trackers")["curves"].load()
    assert driver.api_version == API_VERSION
    assert isinstance(driver.build(driver.Config()), Tracker)
    with pytest.raises(ValidationError):
        driver.Config(path="curves.svg")


@pytest.mark.parametrize("options", [{"project": "p"}, {"tb_project_name": ""}, {"tb_experiment_name": 3}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    driver = entry_points(group="slime.trackers")["tensorboard"].load()
    with pytest.raises(ValidationError):
        driver.Config(**options)
