"""Runs that only generate or only train, fed from the dumps of a whole run; traces and profiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from slime_core.data.train_data import read_train_data, train_data_file

ONE_STEP = ("--num-rollout", "2", "--save-hf", "--save-interval", "none")


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "hf" / "model.safetensors")


REWARDS = """
from slime_core.contracts.reward import Outcome, RewardFailure
from slime_core.plugin import reward


@reward("parity")
def parity(sample):
    if sample.index == 5:
        return RewardFailure(Outcome.INFRA, "the service is away")
    return float(sample.index % 2)
"""


def test_halves_of_a_run_are_fed_from_a_whole_one(tiny, warm):
    """The whole run has two rewards, of which one fails once."""
    run_file, both = (tiny / "run.toml").read_text(), 'rewards = ["gsm8k", { name = "parity", weight = 0.5 }]'
    (tiny / "run.toml").write_text(run_file.replace('reward = "gsm8k"', both))
    (tiny / "rewards.py").write_text(REWARDS)
    whole = tiny.run(
        "--plugin", "rewards.py", "--on-reward-infra", "mask",
        *ONE_STEP, "--name", "whole", "--dump-rollouts", "--save-debug-train-data", "--trace-samples", "--log-multi-turn",
        "--use-pytorch-profiler", "--profile-target", "train_actor,train_log_probs", "--kl-loss-coef", "0.1",
    )  # fmt: skip
    assert whole.code == 0, whole.err
    folder = tiny.runs / "whole"

    traces = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    assert sorted(trace["sample"] for trace in traces) == list(range(8))
    assert all(trace["generate_s"] > 0 and trace["seconds"] >= trace["generate_s"] for trace in traces)
    profiles = sorted(path.name for path in (folder / "profile").iterdir())
    assert profiles == ["actor-rank0-train_actor-1.json", "actor-rank0-train_log_probs-1.json"]
    assert json.loads((folder / "profile" / profiles[0]).read_text())["traceEvents"]
    rollouts = [line["metrics"] for line in tiny.metrics("whole") if line["axis"] == "rollout/step"]
    for name in (
        "perf/tokens_per_gpu_per_sec", "perf/longest_sample_tokens_per_sec", "perf/train_wait_time", "perf/wait_time_ratio",
        "perf/actor_train_tflops", "perf/ref_log_probs_time", "perf/request/queue_time/mean", "rollout/groups",
        "rollout/multi_turn/turns/mean",
    ):  # fmt: skip
        assert np.isfinite(rollouts[0][name]), name

    assert rollouts[0]["rollout/reward_part/parity"] == 0.5
    assert rollouts[0]["rollout/raw_reward"] == rollouts[0]["rollout/reward_part/gsm8k"] + 0.25
    assert [line.get("rollout/reward_outcome/infra", 0) for line in rollouts] == [0, 1]

    # A profile is taken in a process that was started; the other runs are forks.
    tiny.warm = warm
    again = ("--plugin", "rewards.py", "--debug-train-only", "--kl-loss-coef", "0.1", *ONE_STEP)
    recorded = tiny.run(*again, "--name", "recorded", "--load-debug-train-data", str(folder / "train_data"))
    assert recorded.code == 0, recorded.err
    for tensor, values in weights(folder).items():
        np.testing.assert_array_equal(weights(tiny.runs / "recorded")[tensor], values, err_msg=tensor)

    batch, columns = read_train_data(train_data_file(folder / "train_data", 1))
    assert len(batch.index) == 4
    assert columns.ref_log_probs.shape == columns.advantages.shape == batch.mask.shape

    # The sample that was left out.
    assert np.flatnonzero(np.isnan(batch.reward)).tolist() == [1]
    assert not batch.mask[batch.response_rows(np.array([1]))].any()

    alone = tiny.run(
        "--plugin",
        "rewards.py",
        "--on-reward-failure",
        "zero",
        "--debug-rollout-only",
        "--num-rollout",
        "2",
        "--save-hf",
        "--name",
        "alone",
    )
    assert alone.code == 0, alone.err
    assert tiny.steps(run="alone") == [0, 1]
    assert tiny.steps("train/step", run="alone") == []
    assert not (tiny.runs / "alone" / "hf").exists()
