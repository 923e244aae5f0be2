"""Trained weights in float8 by block, pushed to SGLang's own models as each rank of a server builds and loads them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang


def test_a_push_leaves_what_the_converted_folder_would(tmp_path):
    """Stacked matrices, experts on two ranks and latent attention among them; the second load of each model."""
    script = Path(__file__).with_name("quantised_models.py")
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [answer["layout"] for answer in found] == ["dense", "experts-spread", "latent"]
    assert [answer["wrong"] for answer in found] == [[], [], []]
    # Of two ranks and two layers.
    assert all(answer["float8"] >= 16 for answer in found)
