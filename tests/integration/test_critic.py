"""Whole runs with an actor and a critic: warm-up, learning rates of their own, resume, export, and Ray."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import TinyRun
    from slime_plugin_kit.warm_slime import WarmSlime

WARM_UP = 2
STEPS = 4
# Both roles' rates fall from their first step to their last, and the warm-up is the critic's alone.
RUN = (
    "--algo", "ppo", "--num-rollout", str(STEPS), "--num-critic-only-steps", str(WARM_UP), "--lambd", "0.9",
    "--rollout-batch-size", "4", "--num-steps-per-rollout", "2", "--lr", "8e-3", "--critic-lr", "4e-3",
    "--lr-decay-style", "linear", "--keep-checkpoints", "9", "--save-hf",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(
    make_tiny: Callable[[Path], TinyRun], warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory
) -> TinyRun:
    """One run to its end, a checkpoint after each step."""
    tiny = make_tiny(tmp_path_factory.mktemp("critic"))
    tiny.warm = warm
    ended = tiny.run(*RUN)
    assert ended.code == 0, ended.err
    return tiny


def weights(run: Path, step: int, role: str) -> dict[str, np.ndarray]:
    """The model's tensors, from a checkpoint."""
    found: dict[str, np.ndarray] = {}
    for file in (run / f"checkpoints/step_{step}/trainer" / role / "state").glob("*.safetensors"):
        found |= {name: tensor for name, tensor in load_file(file).items() if name.startswith("model.")}
    assert found
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


def of_axis(tiny: TinyRun, axis: str, run: str = "tiny") -> list[dict[str, Any]]:
    return [record["metrics"] for record in tiny.metrics(run) if record["axis"] == axis]


def test_warming_up_the_critic_leaves_the_actor_as_it_is(finished: TinyRun) -> None:
    run = finished.runs / "tiny"
    start = {f"model.{name}": tensor for name, tensor in load_file(finished / "base/model.safetensors").items()}
    actors = [weights(run, step, "actor") for step in range(1, STEPS + 1)]
    critics = [weights(run, step, "critic") for step in range(1, STEPS + 1)]
    assert [same(actor, start) for actor in actors] == [True, True, False, False]
    assert not same(actors[2], actors[3])
    assert not any(same(one, other) for one, other in itertools.pairwise(critics))
    assert {"model.score.weight", "model.score.bias"} <= set(critics[0])
    states = [json.loads((run / f"checkpoints/step_{step}/state.json").read_text()) for step in range(1, STEPS + 1)]
    # A step that trains the critic alone is a policy version too.
    assert [(state["version"], state["optimizer_steps"]) for state in states] == [(1, 2), (2, 4), (3, 6), (4, 8)]


def test_each_role_reports_under_its_own_names_and_counts_its_own_steps(finished: TinyRun) -> None:
    steps = of_axis(finished, "train/step")
    assert len(steps) == 2 * STEPS
    warm_up, after = steps[: 2 * WARM_UP], steps[2 * WARM_UP :]
    of_critic = {f"train/critic-{name}" for name in ("loss", "value_loss", "value_clipfrac", "grad_norm", "lr-pg_0")}
    assert all(of_critic <= set(step) for step in steps)
    of_actor = {"train/loss", "train/pg_loss", "train/entropy_loss", "train/grad_norm", "train/lr-pg_0"}
    assert not any(of_actor & set(step) for step in warm_up)
    assert all(of_actor <= set(step) for step in after)
    assert not any("train/critic-entropy_loss" in step or "train/value_loss" in step for step in steps)
    rates = [step["train/critic-lr-pg_0"] for step in steps]
    assert rates == pytest.approx([4e-3 * (1 - done / 8) for done in range(8)], rel=1e-6)
    rates = [step["train/lr-pg_0"] for step in after]
    assert rates == pytest.approx([8e-3 * (1 - done / 4) for done in range(4)], rel=1e-6)
    rollouts = of_axis(finished, "rollout/step")
    assert all({"rollout/values", "rollout/returns", "rollout/explained_variance"} <= set(row) for row in rollouts)
    # Log-probs of an actor that does not train are not computed.
    assert ["rollout/log_probs" in row for row in rollouts] == [False, False, True, True]
    assert all("perf/critic_train_time" in row for row in rollouts)


@pytest.mark.bits
@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(
    finished: TinyRun, warm_pair: tuple[WarmSlime, WarmSlime], tmp_path: Path, step: int
) -> None:
    """Resumes within the warm-up, and after it, in processes with another hash seed."""
    runs = shutil.copytree(finished.runs, tmp_path / "runs")
    (runs / "tiny/summary.json").unlink()
    shutil.rmtree(runs / "tiny/hf")
    shutil.rmtree(runs / "tiny/hf-critic")
    words = ("run", "run.toml", *RUN, "--runs-dir", str(runs), "--ckpt-step", str(step))
    code, out, err = warm_pair[1].run(words, finished.folder)
    assert code == 0, err
    assert f"from step {step}" in out
    for role in ("actor", "critic"):
        folders = [path / f"tiny/checkpoints/step_{STEPS}/trainer" / role for path in (finished.runs, runs)]
        files = [sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) for folder in folders]
        assert files[0] == files[1]
        for name in files[0]:
            one, other = (load_file(folder / name) for folder in folders)
            assert same(one, other), f"{role}: {name}"
    assert same(*(load_file(path / "tiny/hf-critic/model.safetensors") for path in (finished.runs, runs)))


@pytest.mark.bits
def test_the_critic_is_exported_and_another_run_starts_from_it(finished: TinyRun) -> None:
    exported = finished.runs / "tiny/hf-critic"
    code = (
        "import sys\n"
        "from transformers import AutoModelForTokenClassification, AutoTokenizer\n"
        "model = AutoModelForTokenClassification.from_pretrained(sys.argv[1])\n"
        "asked = AutoTokenizer.from_pretrained(sys.argv[1])('3+4=', return_tensors='pt')\n"
        "print(model(**asked).logits.shape[-1])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(exported)], capture_output=True, text=True, check=True)
    assert shown.stdout == "1\n"
    words = ("--algo", "ppo", "--num-rollout", "1", "--critic-optimizer", "sgd", "--critic-lr", "1e-12", "--save-hf")
    ended = finished.run(*words, "--name", "next", "--critic-load", str(exported))
    assert ended.code == 0, ended.err
    assert same(
        load_file(exported / "model.safetensors"), load_file(finished.runs / "next/hf-critic/model.safetensors")
    )


def test_a_critic_folder_that_is_not_there(finished: TinyRun) -> None:
    ended = finished.run("--algo", "ppo", "--critic-load", "elsewhere", "--num-rollout", "1")
    assert ended.error.startswith(f"roles.critic.load = {finished / 'elsewhere'}: no such folder.")


@pytest.mark.bits
def test_colocated_roles_and_engine_end_with_the_same_bits(finished: TinyRun) -> None:
    """Trainers and engine are offloaded in turn between phases, and the results do not change."""
    words = ("--name", "colocated", "--colocate", "--offload-train", "--offload-rollout")
    ended = finished.run(*RUN, *words)
    assert ended.code == 0, ended.err
    for role in ("actor", "critic"):
        assert same(weights(finished.runs / "colocated", STEPS, role), weights(finished.runs / "tiny", STEPS, role))
    refused = finished.run(*RUN, *words, "--max-async-level", "1")
    assert "so rollouts cannot run 1 step(s) ahead. Pass --max-async-level 0" in refused.error


@pytest.mark.ray
@pytest.mark.slow
def test_ray_equals_one_process(finished: TinyRun) -> None:
    """On one replayed dump, an SGD step of both: two ranks that take turns on their devices, and a critic with one of
    its own beside them."""
    dump = finished.runs / "dump/rollouts"
    sizes = ("--rollout-batch-size", "6", "--n-samples-per-prompt", "4")
    ended = finished.run("--num-rollout", "1", *sizes, "--dump-rollouts", "--name", "dump")
    assert ended.code == 0, ended.err
    replay = (
        "--algo", "ppo", "--rollout.collector", "replay", "--collector.folder", str(dump), "--num-rollout", "1", *sizes,
        "--optimizer", "sgd", "--lr", "0.1", "--max-tokens-per-gpu", "64", "--kl-coef", "0.05", "--lambd", "0.9",
        "--save-hf",
    )  # fmt: skip
    ray = ("--launcher", "ray", "--actor-num-gpus-per-node", "2")
    for name, launcher in (
        ("one", ()),
        ("turns", (*ray, "--offload-train")),
        ("apart", (*ray, "--critic-num-gpus-per-node", "1")),
    ):
        ended = finished.run(*replay, *launcher, "--name", name)
        assert ended.code == 0, ended.err
    one, *others = ((of_axis(finished, "train/step", name)[0], name) for name in ("one", "turns", "apart"))
    assert one[0]["train/grad_norm"] > 0
    assert one[0]["train/critic-grad_norm"] > 0
    for metrics, other in others:
        assert set(metrics) == set(one[0])
        for name, value in one[0].items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (other, name)
        for folder in ("hf", "hf-critic"):
            left, right = (load_file(finished.runs / run / folder / "model.safetensors") for run in ("one", other))
            for name in left:
                np.testing.assert_allclose(right[name], left[name], rtol=1e-5, atol=1e-6, err_msg=f"{other} {name}")
