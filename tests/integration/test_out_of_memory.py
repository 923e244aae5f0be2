"""A micro-batch for which there is no memory, in whole runs: real errors of torch's allocator, from a loss that asks for too
much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

WORDS = (
    "--plugin",
    "wide.py",
    "--algo.loss",
    "wide",
    "--reward",
    "odd",
    "--num-rollout",
    "3",
    "--rollout-batch-size",
    "4",
)
WIDE = """
import torch
from slime_core.contracts.loss import LossOutput
from slime_core.plugin import loss, reward


@loss("wide", needs=set())
def wide(inputs, segments):
    if len(inputs.log_probs) > {most}:
        torch.empty(2**60, dtype=torch.uint8)
    return LossOutput(values=-inputs.log_probs * inputs.advantages)


@reward("odd")
def odd(sample):
    return float(sample.index % 2)
"""


def trained(tiny: TinyRun) -> list[dict[str, Any]]:
    return [line["metrics"] for line in tiny.metrics() if line["axis"] == "train/step"]


def test_one_rank_splits_and_counts_it(tiny: TinyRun) -> None:
    (tiny / "wide.py").write_text(WIDE.format(most=1000))
    assert tiny.run(*WORDS, "--fresh").code == 0
    straight = trained(tiny)
    (tiny / "wide.py").write_text(WIDE.format(most=10))
    ended = tiny.run(*WORDS, "--fresh")
    assert ended.code == 0, ended.err
    found = trained(tiny)
    # Eight responses of up to four tokens each.
    assert all(metrics["train/split_micro_batches"] >= 1 for metrics in found)
    assert all("train/split_micro_batches" not in metrics for metrics in straight)
    for got, expected in zip(found, straight, strict=True):
        assert got["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
        assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


def test_one_sample_that_does_not_fit_ends_the_run_with_its_size(tiny: TinyRun) -> None:
    (tiny / "wide.py").write_text(WIDE.format(most=0))
    ended = tiny.run(*WORDS)
    assert ended.code == 6
    assert "out of memory in micro-batch 1 of " in ended.error
    assert "in 1 sample(s). One sample cannot be split: lower --rollout-max-response-len" in ended.error


@pytest.mark.ray
def test_several_ranks_name_the_micro_batch_and_the_flag(tiny: TinyRun) -> None:
    (tiny / "wide.py").write_text(WIDE.format(most=2))
    ended = tiny.run(*WORDS, "--launcher", "ray", "--actor-num-gpus-per-node", "2")
    assert ended.code == 6
    assert "out of memory in micro-batch 1 of 1 of an optimizer step: " in ended.error
    assert " Pass --max-tokens-per-gpu " in ended.error
