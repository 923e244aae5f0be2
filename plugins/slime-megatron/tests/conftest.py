"""Models, and one process per family of layouts: importing Megatron takes longer than all its cases."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

TIMEOUT_S = 400


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("every_test_runs"):
        terminalreporter.section("trainers")
        for name in ("megatron-core", "torch", "transformers"):
            terminalreporter.line(f"{name} {version(name)}")


class Layouts:
    """What each case of one model left."""

    def __init__(self, out, cases):
        self.out = out
        self.cases = cases

    def ranks(self, name):
        failure = self.out / name / "failure.txt"
        assert not failure.exists(), failure.read_text()[-4000:]
        count = self.cases[name]["world_size"]
        return [torch.load(self.out / name / f"rank_{rank}.pt", weights_only=True) for rank in range(count)]


def run_layouts(out, cases):
    """`cases`: model, options, world_size and more by name; see layouts.py."""
    script = Path(__file__).parent / "layouts.py"
    told = {"out": str(out), "cases": cases}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), json.dumps(told)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return Layouts(out, cases)
