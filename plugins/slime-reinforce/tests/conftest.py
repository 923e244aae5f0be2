"""Build a part by the name that a run file would use, and batches to try it on."""

from __future__ import annotations

from importlib.metadata import entry_points

import numpy as np
import pytest

from slime_core.types.batch import Batch


@pytest.fixture
def part():
    def build(group, name, **options):
        driver = entry_points(group=group)[name].load()
        return driver.build(driver.Config(**options))

    return build


@pytest.fixture
def make_batch():
    """One sample for each mask; `credit_key` all the same and a rollout for each sample, unless given."""

    def make(rewards, masks, credit_key=None, rollout_id=None):
        count = len(rewards)
        response_length = np.array([len(mask) for mask in masks], np.int32)
        response = int(response_length.sum())
        return Batch(
            index=np.arange(count),
            group_index=np.zeros(count, np.int64),
            rollout_id=np.arange(count) if rollout_id is None else np.asarray(rollout_id, np.int64),
            credit_key=np.zeros(count, np.int64) if credit_key is None else np.asarray(credit_key, np.int64),
            reward=np.asarray(rewards, np.float64),
            truncated=np.zeros(count, bool),
            prompt_length=np.ones(count, np.int32),
            response_length=response_length,
            tokens=np.zeros(response + count, np.int32),
            mask=np.array([bit for mask in masks for bit in mask], np.uint8),
            rollout_log_probs=np.zeros(response, np.float32),
            version=np.zeros(response, np.int32),
        )

    return make
