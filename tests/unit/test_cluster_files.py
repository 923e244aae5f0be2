"""examples/cluster: what can be said of it without a cluster."""

import re
import subprocess
from pathlib import Path

from slime_core.config.flags import kernel_flags

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"


def test_the_job_script_parses():
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], check=True)


def test_the_flags_of_the_run_exist():
    script = (CLUSTER / "slurm.sh").read_text()
    (command,) = re.findall(r"slime run \"\$@\" (.*) &", script)
    (typed,) = re.findall(
        r"(?s)sbatch examples/cluster/slurm.sh run.toml (.*?)\n\n", (CLUSTER / "README.md").read_text()
    )
    known = {flag.name for flag in kernel_flags()} | {"backend", "engine", "launcher", "tensor-model-parallel-size"}
    said = re.findall(r"--([a-z-]+)", command + typed)
    assert len(said) > 6
    assert set(said) <= known


def test_the_image_holds_every_plugin():
    (line,) = re.findall(r"(?m)^PLUGINS := (.*)$", (ROOT / "Makefile").read_text())
    image = (CLUSTER / "Containerfile").read_text()
    assert [plugin for plugin in line.split() if f"plugins/{plugin}" not in image] == []
