"""Whole runs of the `slime` command: on two ranks under Ray, continued in other layouts, and mixed with another backend."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_plugin_kit.listening_sockets import PLUGIN, beyond_loopback

pytestmark = pytest.mark.megatron

TYPED = ("--backend", "megatron", "--algo", "gspo", "--launcher", "ray", "--tensor-model-parallel-size", "2")
STEPS = 6
HALF = 3
FLOAT32 = 2e-4
"""Tolerance of rewards and losses after some optimizer steps: until a sampled token differs, they differ only by sums in
another order."""


@pytest.fixture(scope="module")
def project(make_project, tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("project"))
    with (project.folder / "reward.py").open("a") as file:
        file.write(f"\n\n{PLUGIN}")
    return project


@pytest.fixture(scope="module")
def finished(project):
    """Runs the command of a user: two ranks of a private Ray cluster."""
    return project.run(*TYPED, "--name", "tp2", started=True)


def curves(project, run):
    names = ("train/loss", "train/pg_loss", "train/grad_norm", "train/entropy_loss")
    return [[metrics[name] for name in names] for metrics in project.metrics(run, "train/step")]


def weights(project, run, role="hf"):
    return load_file(project.folder / "runs" / run / role / "model.safetensors")


def halfway(project, run, to):
    """A copy of the run, in the state of a run that was killed after half of its steps."""
    folder = project.folder / "runs" / to
    shutil.copytree(project.folder / "runs" / run, folder)
    shutil.rmtree(folder / "hf")
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / f"checkpoints/step_{STEPS}")
    return folder


def test_two_ranks_under_ray_learn_like_fsdp(project, finished):
    assert "backend megatron x 2" in finished.stdout
    assert beyond_loopback(project.folder / "runs/tp2/listening.txt") == []
    project.run("--backend", "fsdp", "--name", "fsdp")
    rewards = project.rewards("tp2")
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.3
    assert rewards == pytest.approx(project.rewards("fsdp"), abs=0.02)
    for got, expected in zip(curves(project, "tp2")[:4], curves(project, "fsdp")[:4], strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=FLOAT32)
    assert weights(project, "tp2").keys() == weights(project, "fsdp").keys()


def test_its_checkpoint_is_converted_to_a_folder(project, finished):
    words = ("--to", "hf", "--hf-checkpoint", "base", "--workers", "1")
    done = project.slime("convert", f"runs/tp2/checkpoints/step_{STEPS}/trainer/actor", "converted", *words)
    assert done.returncode == 0, done.stderr
    assert "read back and equal" in done.stdout
    got, expected = {}, weights(project, "tp2")
    for file in (project.folder / "converted").glob("*.safetensors"):
        got |= load_file(file)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.bits
def test_it_continues_with_the_same_bits(project, finished):
    """The resumed run writes its checkpoints during steps. A run that moves to a device with another default dtype has to set
    its own, and the error has the flag: here bfloat16 is set, which is the default on GPUs."""
    halfway(project, "tp2", "again")
    message = project.refused("--name", "tp2", "--resume", "runs/again", "--backend.bf16", "true")
    assert "--resume with the run's folder, and --backend.bf16 false." in " ".join(message.split())
    words = (*TYPED, "--name", "tp2", "--resume", "runs/again")
    project.run(*words, "--async-save", "--backend.bf16", "false", started=True)
    assert (project.folder / f"runs/again/checkpoints/step_{STEPS}/COMPLETE").exists()
    assert curves(project, "again") == curves(project, "tp2")
    straight, resumed = weights(project, "tp2"), weights(project, "again")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_it_continues_in_another_layout(project, finished):
    """From two ranks that share matrices to one rank that has all of them."""
    halfway(project, "tp2", "one")
    project.run("--name", "tp2", "--resume", "runs/one")
    steps = 2 * HALF
    assert curves(project, "one")[:steps] == curves(project, "tp2")[:steps]
    for got, expected in zip(curves(project, "one")[steps:], curves(project, "tp2")[steps:], strict=True):
        assert got == pytest.approx(expected, rel=1e-2, abs=FLOAT32)
    config = json.loads((project.folder / "runs/one/manifest.json").read_text())["config"]
    assert config["backend"]["tensor_model_parallel_size"] == 1


def test_a_resumed_run_may_not_change_its_training(project, finished):
    message = project.refused(
        "--backend", "megatron", "--name", "tp2", "--rollout-temperature", "0.5", "--resume", "runs/tp2"
    )
    assert "another run" in message
    assert "rollout.rollout_temperature: 1.0 -> 0.5" in message


def test_an_actor_on_megatron_and_a_critic_on_fsdp(project):
    words = ("--algo", "ppo", "--num-rollout", "2", "--critic-lr", "1e-2")
    for actor, critic in (("fsdp", "fsdp"), ("megatron", "fsdp"), ("fsdp", "megatron")):
        project.run(*words, "--backend", actor, "--critic-backend", critic, "--name", f"{actor}-{critic}")
    expected = project.metrics("fsdp-fsdp", "train/step")
    assert expected[-1]["train/critic-value_loss"] > 0
    for run in ("megatron-fsdp", "fsdp-megatron"):
        for got, required in zip(project.metrics(run, "train/step"), expected, strict=True):
            for name in ("train/loss", "train/critic-loss", "train/critic-value_loss", "train/critic-grad_norm"):
                assert got[name] == pytest.approx(required[name], rel=2e-3, abs=FLOAT32), (run, name)
        # A critic of one backend is a folder that the other one can load.
        critics = [weights(project, name, "hf-critic") for name in (run, "fsdp-fsdp")]
        assert critics[0].keys() == critics[1].keys()


THIRD_PARTY = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "acme-megatron"
version = "1.2.3"
dependencies = ["slime-megatron"]
[project.entry-points."slime.backends"]
acme = "acme_megatron:Acme"
[tool.hatch.build.targets.wheel]
packages = ["acme_megatron"]
""",
    "acme_megatron/__init__.py": """\
from slime_megatron.config import MegatronOptions
from slime_megatron.plugin import Megatron


class AcmeConfig(Megatron.Config):
    log: str = "acme.log"
    \"\"\"File that gets a line for each optimizer step.\"\"\"


class Acme(Megatron):
    \"\"\"Megatron, watched.\"\"\"

    Config = AcmeConfig

    @classmethod
    def build(cls, config):
        from acme_megatron.backend import AcmeBackend

        return AcmeBackend(config)
""",
    "acme_megatron/backend.py": """\
from pathlib import Path

from slime_megatron.backend import MegatronBackend


class AcmeBackend(MegatronBackend):
    def train_step(self, micros, objective):
        report = super().train_step(micros, objective)
        with Path(self._config.log).open("a") as file:
            file.write(f"{report.grad_norm}\\n")
        return report
""",
}


def test_a_backend_of_another_distribution(project, tmp_path):
    for name, text in THIRD_PARTY.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "wheels").mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path / "wheels")]
    subprocess.run(command, cwd=tmp_path / "source", check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    options = ["--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)]
    uv = Path(sys.executable).with_name("uv")
    installer = [str(uv), "pip", "install"] if uv.exists() else [sys.executable, "-m", "pip", "install"]
    subprocess.run([*installer, *options], check=True, capture_output=True)

    log = tmp_path / "steps.log"
    words = ("--backend", "acme", "--num-rollout", "1", "--set", f"backend.log={log}", "--name", "acme")
    project.run(*words, site=tmp_path / "site")
    assert len(log.read_text().splitlines()) == 2
    manifest = json.loads((project.folder / "runs/acme/manifest.json").read_text())
    assert "slime.backends:acme-megatron/acme 1.2.3" in manifest["plugins"].values()
