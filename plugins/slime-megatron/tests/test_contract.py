"""The contract kit, on a backend of one rank and on two."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.megatron


def test_it_keeps_its_contract(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--slime-plugin", "slime-megatron"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
