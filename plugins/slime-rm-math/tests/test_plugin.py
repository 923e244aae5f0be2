import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core.contracts.reward import RewardDriver
from slime_rm_math.plugin import Dapo, DeepScaler, Gsm8k, Math


def test_entry_points_resolve() -> None:
    for name, expected in {"math": Math, "dapo": Dapo, "deepscaler": DeepScaler, "gsm8k": Gsm8k}.items():
        driver = entry_points(group="slime.rewards")[name].load()
        assert driver is expected
        assert issubclass(driver, RewardDriver)
        assert driver.Config.model_validate_json(driver.Config().model_dump_json()) == driver.Config()
        assert all(field.description for field in driver.Config.model_fields.values())


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        (Math, {"max_chars": 3}),
        (Math, {"max_symbolic_chars": -1}),
        (Dapo, {"window_chars": 0}),
        (DeepScaler, {"think_end": ""}),
    ],
)
def test_wrong_options_are_refused(driver: type[RewardDriver], options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        driver.Config(**options)


def test_listing_imports_nothing_heavy() -> None:
    code = "import sys, slime_rm_math.plugin; print([m for m in ('torch', 'sympy', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
