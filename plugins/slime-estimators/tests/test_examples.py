"""The weights of the examples, which were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.contracts.loss import LossInputs
from slime_core.types.batch import Batch, TokenColumns
from slime_training.segments import LocalSegments

NAMES = ("tis", "icepop", "mis", "opsm")


def flat(samples, name):
    rows = [getattr(sample, name) for sample in samples]
    return None if any(row is None for row in rows) else np.array([x for row in rows for x in row], np.float32)


def batch_weights(part, samples):
    lengths = np.array([len(sample.mask) for sample in samples], np.int32)
    count, total = len(samples), int(lengths.sum())
    batch = Batch(
        index=np.arange(count),
        group_index=np.zeros(count, np.int64),
        rollout_id=np.arange(count),
        credit_key=np.zeros(count, np.int64),
        reward=np.zeros(count),
        truncated=np.zeros(count, np.bool_),
        prompt_length=np.ones(count, np.int32),
        response_length=lengths,
        tokens=np.zeros(total + count, np.int32),
        mask=flat(samples, "mask").astype(np.uint8),
        rollout_log_probs=flat(samples, "rollout_log_probs"),
        version=np.zeros(total, np.int32),
    )
    corrected = part.correct_batch(batch, TokenColumns(old_log_probs=flat(samples, "old_log_probs")))
    return np.where(corrected.keep, corrected.weights, 0.0)


def loss_weights(part, samples):
    def column(name):
        values = flat(samples, name)
        return None if values is None else torch.from_numpy(values)

    segments = torch.tensor([n for n, sample in enumerate(samples) for _ in sample.mask])
    inputs = LossInputs(
        mask=column("mask").bool(),
        log_probs=column("log_probs"),
        advantages=column("advantages"),
        old_log_probs=column("old_log_probs"),
        rollout_log_probs=column("rollout_log_probs"),
    )
    return part.correct_loss(inputs, LocalSegments(segments, len(samples))).weights.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_the_examples(correction, name, tmp_path):
    driver = correction(name)
    examples = driver.examples(tmp_path)
    assert examples
    for example in examples:
        part = driver.build(driver.Config(**example.options))
        weights = (loss_weights if driver.in_loss else batch_weights)(part, example.samples)
        trained = flat(example.samples, "mask") > 0
        expected = np.array([w for row in example.weights for w in row])
        np.testing.assert_allclose(weights[trained], expected[trained], rtol=1e-5, atol=1e-7)
