"""Curves of metrics.jsonl, compared with sums by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from written_runs import write_metrics

from slime_viewer.metric_log import MetricLog, eval_sets, in_buckets


def test_a_curve_has_the_tokens_and_hours_until_its_steps(run_folder: Path) -> None:
    log = MetricLog(run_folder)
    assert log.refresh()
    loss, reward, test = (log.curve(name) for name in ("train/loss", "rollout/raw_reward", "eval/test"))
    assert loss is not None
    assert reward is not None
    assert test is not None
    assert loss.value.tolist() == [0.5, 0.25]
    for curve in (loss, reward):
        assert curve.hours is not None
        assert curve.tokens is not None
        assert curve.hours.tolist() == [1.0, 1.5]
        assert curve.tokens.tolist() == [10, 40]
    assert (test.step.tolist(), test.hours.tolist() if test.hours is not None else None) == ([2], [1.5])
    assert eval_sets(log) == ["test"]
    assert not log.refresh()


def test_a_metric_that_comes_later_has_no_points_before(run_folder: Path) -> None:
    log = MetricLog(run_folder)
    log.refresh()
    write_metrics(run_folder, [("train/step", 2, 2, {"train/kl": 3.0})], attempt=2)
    assert log.refresh()
    kl, loss = log.curve("train/kl"), log.curve("train/loss")
    assert kl is not None
    assert loss is not None
    assert (kl.step.tolist(), kl.attempt.tolist()) == ([2], [2])
    assert loss.step.tolist() == [0, 1]


def test_a_line_that_is_no_metrics_is_named(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"axis": "train/step"}\n')
    log = MetricLog(run_folder)
    log.refresh()
    assert log.problem is not None
    assert "step" in log.problem
    curve = log.curve("train/loss")
    assert curve is not None
    assert len(curve.value) == 2


def test_buckets_have_means_and_extremes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=1003)
    write_metrics(tmp_path, [("train/step", step, step, {"m": float(value)}) for step, value in enumerate(values)])
    log = MetricLog(tmp_path)
    log.refresh()
    curve = log.curve("m")
    assert curve is not None
    last, mean, low, high = in_buckets(curve, 10)
    assert low is not None
    assert high is not None
    first = 0
    for place, end in enumerate(last.tolist()):
        bucket = values[first : end + 1]
        np.testing.assert_allclose([mean[place], low[place], high[place]], [bucket.mean(), bucket.min(), bucket.max()])
        first = end + 1
    assert first == 1003
    assert in_buckets(curve, 2000)[2] is None
