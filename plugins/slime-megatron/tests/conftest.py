"""Models, layouts, and whole runs."""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from slime_plugin_kit.rank_server import RankServer
from slime_plugin_kit.warm_slime import WarmSlime, warm_slime

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

TIMEOUT_S = 900


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("every_test_runs"):
        terminalreporter.section("trainers")
        for name in ("megatron-core", "torch", "transformers"):
            terminalreporter.line(f"{name} {version(name)}")


class Layouts:
    """The results of each case of one model."""

    def __init__(self, out, cases):
        self.out = out
        self.cases = cases

    def ranks(self, name):
        failure = self.out / name / "failure.txt"
        assert not failure.exists(), failure.read_text()[-4000:]
        count = self.cases[name]["world_size"]
        return [torch.load(self.out / name / f"rank_{rank}.pt", weights_only=True) for rank in range(count)]


@functools.cache
def layout_server():
    """Ends with this process. There is one for all files: importing Megatron takes longer than most layouts."""
    script = Path(__file__).parent / "layouts.py"
    return RankServer([sys.executable, "-W", "ignore", str(script)], timeout_s=TIMEOUT_S)


def run_layouts(out, cases):
    """`cases`: model, options, world_size and more by name; see layouts.py."""
    layout_server().run({"out": str(out), "cases": cases})
    return Layouts(out, cases)


IMPORTED = (
    "slime_sources.files",
    "slime_core.cli.main",
    "slime_core.cli.training",
    "slime_core.controller.loop",
    "slime_core.controller.run_inputs",
    "slime_core.controller.startup",
    "slime_fsdp.backend",
    "slime_local.engine",
    "slime_megatron.backend",
    "slime_megatron.conversion",
    "transformers.models.qwen3.modeling_qwen3",
)
SLIME = [sys.executable, "-W", "ignore", "-c", "from slime_core.cli.main import main; main()"]
REWARD = """\
from slime_core.plugin import reward


@reward("sevens")
def sevens(sample) -> float:
    return sample.response.count("7") / max(sample.response_length, 1)
"""
RUN = """\
name = "sevens"
plugin = ["reward.py"]
backend = "megatron"
engine = "local"
reward = "sevens"
algo = "gspo"
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 8, n_samples_per_prompt = 8, rollout_max_response_len = 6 }
train = { num_rollout = 6, lr = 1e-2, adam_eps = 1e-3, num_steps_per_rollout = 2 }
checkpoint = { save_interval = 3, keep_checkpoints = 9, save_hf = true }
"""


@dataclass(frozen=True)
class Project:
    """A folder with run.toml, base/ (a model), data and a reward, in which the `slime` command is run."""

    folder: Path
    warm: WarmSlime

    def slime(self, *words, site=None, started=False):
        """`site`: a folder of installed distributions to put before the others. The command is a fork, unless there is a `site`
        or it is `started`."""
        if site is None and not started:
            return subprocess.CompletedProcess(words, *self.warm.run(words, self.folder, timeout_s=TIMEOUT_S))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if site is not None:
            env["PYTHONPATH"] = str(site)
        return subprocess.run(
            [*SLIME, *words], cwd=self.folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def run(self, *words, **more):
        done = self.slime("run", "run.toml", *words, **more)
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    def refused(self, *words, **more):
        """Returns the error that the command prints, in one paragraph."""
        done = self.slime("run", "run.toml", *words, **more)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr, done.stderr
        _, found, message = done.stderr.rpartition("error: ")
        assert found, done.stderr
        return message

    def metrics(self, run, axis):
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [record["metrics"] for record in map(json.loads, lines) if record["axis"] == axis]

    def rewards(self, run):
        return [metrics["rollout/raw_reward"] for metrics in self.metrics(run, "rollout/step")]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    from slime_plugin_kit.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    with warm_slime(tmp_path_factory.mktemp("warm"), IMPORTED) as warm:
        yield warm


@pytest.fixture(scope="session")
def make_project(tiny_base, warm):
    def make(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(RUN)
        (folder / "reward.py").write_text(REWARD)
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.copytree(tiny_base, folder / "base")
        return Project(folder, warm)

    return make
