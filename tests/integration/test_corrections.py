"""Corrections and mismatch metrics in whole runs: the local engine's log-probs equal the trainer's but for rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.runs, pytest.mark.usefixtures("tiny_forks")]

NEAR = 1e-5


def metrics_of(tiny: TinyRun, axis: str) -> dict[str, float]:
    return next(record["metrics"] for record in tiny.metrics() if record["axis"] == axis)


def test_weights_of_a_second_optimizer_step(tiny: TinyRun) -> None:
    ended = tiny.run("--num-rollout", "1", "--num-steps-per-rollout", "2", "--corrections", "tis", "opsm", "mis")
    assert (ended.code, ended.err) == (0, "")
    step = metrics_of(tiny, "train/step")
    for name in ("tis", "ois", "mis_weight_mean", "mis_ratio_max", "mis_ratio_min", "mis_ppl_ratio"):
        assert step[f"train/{name}"] == pytest.approx(1, abs=NEAR), name
    for name in ("tis_clipfrac", "opsm_clipfrac", "mis_veto_fraction", "mis_truncate_fraction"):
        assert step[f"train/{name}"] == 0, name
    assert step["train/global_batch_size"] == 2
    assert step["train/mis_training_ppl"] == pytest.approx(step["train/mis_rollout_ppl"], rel=NEAR)
    assert step["train/mis_training_ppl"] > 2


def test_the_engines_log_probs_are_compared_although_the_loss_takes_them_for_the_old_ones(tiny: TinyRun) -> None:
    ended = tiny.run("--num-rollout", "1", "--use-rollout-logprobs", "--get-mismatch-metrics")
    assert (ended.code, ended.err) == (0, "")
    step, rollout = metrics_of(tiny, "train/step"), metrics_of(tiny, "rollout/step")
    assert 0 <= step["train/train_rollout_logprob_abs_diff"] < NEAR
    assert step["train/mis_ratio_max"] == pytest.approx(1, abs=NEAR)
    assert rollout["rollout/log_probs"] == pytest.approx(rollout["rollout/rollout_log_probs"], abs=NEAR)
    assert rollout["rollout/repetition_frac"] == 0


def test_responses_that_were_cut_off_train_nothing(tiny: TinyRun) -> None:
    ended = tiny.run("--num-rollout", "1", "--filters", "overlong_filter")
    assert (ended.code, ended.err) == (0, "")
    rollout = metrics_of(tiny, "rollout/step")
    num_cut = rollout["rollout/truncated_ratio"] * 4
    assert num_cut == rollout["rollout/dynamic_filter/untrained_samples"] > 0
    assert rollout["rollout/response_len/mean"] < 4
