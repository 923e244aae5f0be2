"""examples/cluster: what can be tested without a cluster."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slime_core.config.flags import kernel_flags, option_flags
from slime_ray.config import RayConfig

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"


def test_the_job_script_parses():
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], check=True)


STAND_INS = {
    "srun": """\
case "$*" in
    *hostname*) echo 127.0.0.1 ;;
    *"ray status"*) echo " 1 node_a" ;;
    *) exec sleep 60 ;;
esac
""",
    "scontrol": 'case "$1" in show) echo node1 ;; *) echo "$*" >> calls ;; esac\n',
    # Stops like slime: once, with the signal's exit code.
    "slime": 'trap "echo saved >> calls; exit 143" TERM\ntouch up\nwhile :; do sleep 0.05; done\n',
}


@pytest.mark.parametrize(
    ("number", "calls"), [(signal.SIGUSR1, ["saved", "requeue 7"]), (signal.SIGUSR2, ["saved"])], ids=["limit", "stop"]
)
def test_a_job_saves_and_is_requeued_at_its_time_limit(tmp_path, number, calls):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    job = subprocess.Popen(["bash", CLUSTER / "slurm.sh", "run.toml"], cwd=tmp_path, env=env)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.send_signal(number)
        job.wait(30)
    finally:
        job.kill()
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert not (tmp_path / ".ray-token-7").exists()


def test_the_flags_of_the_run_exist():
    script = (CLUSTER / "slurm.sh").read_text()
    (command,) = re.findall(r"slime run \"\$@\" (.*) &", script)
    (typed,) = re.findall(
        r"(?s)sbatch examples/cluster/slurm.sh run.toml (.*?)\n\n", (CLUSTER / "README.md").read_text()
    )
    known = {flag.name for flag in kernel_flags()} | {"backend", "engine", "launcher", "tensor-model-parallel-size"}
    known |= {flag.name for flag in option_flags(RayConfig, ("launcher",), "slime-ray")}
    given = re.findall(r"--([a-z-]+)", command + typed)
    assert len(given) > 6
    assert set(given) <= known


def test_the_image_holds_every_plugin():
    (line,) = re.findall(r"(?m)^PLUGINS := (.*)$", (ROOT / "Makefile").read_text())
    image = (CLUSTER / "Containerfile").read_text()
    assert [plugin for plugin in line.split() if f"plugins/{plugin}" not in image] == []
