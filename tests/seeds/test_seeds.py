"""Three of upstream's commands, translated and run for two steps: synchronous, asynchronous, supervised."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from slime_plugin_kit.warm_slime import WarmSlime

SPEC = importlib.util.spec_from_file_location("seed_commands", Path(__file__).parent / "run.py")
assert SPEC is not None
assert SPEC.loader is not None
commands = importlib.util.module_from_spec(SPEC)
sys.modules["seed_commands"] = commands
SPEC.loader.exec_module(commands)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, warm: WarmSlime) -> Path:
    made = tmp_path_factory.mktemp("seeds")
    commands.prepare(made, warm)
    return made


@pytest.mark.runs
@pytest.mark.parametrize("name", ["glm4-9b", "fully-async", "sft"])
def test_a_command_of_upstream_trains_two_steps(folder: Path, warm: WarmSlime, name: str) -> None:
    ran = commands.run(folder, name, warm)
    assert ran.steps == 2
    assert "CHANGES THE TRAINING" not in ran.notes
