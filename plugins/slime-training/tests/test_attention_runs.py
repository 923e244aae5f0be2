"""How a packed stream is split into runs for attention kernels."""

import numpy as np
import pytest
import torch

from slime_training.attention_runs import padded_length, runs_of

CPU = torch.device("cpu")


def test_one_run_unless_long_sequences_are_separate():
    (run,) = runs_of(np.array([3, 9, 2]), np.array([3, 9, 4]), CPU)
    assert (run.queries, run.keys, run.max_queries, run.max_keys) == (slice(0, 14), slice(0, 16), 9, 9)
    assert run.cu_queries.tolist() == [0, 3, 12, 14]
    assert run.cu_keys.tolist() == [0, 3, 12, 16]
    assert run.cu_queries.dtype == torch.int32
    assert not run.is_long


def test_each_long_sequence_is_a_run_and_what_lies_between_is_one():
    queries = np.array([8, 3, 2, 9, 8, 1, 7])
    # The fifth reads keys of others: for any length, it requires the other kernel.
    keys = np.array([8, 3, 2, 9, 20, 1, 7])
    runs = runs_of(queries, keys, CPU, long=8)
    assert [run.is_long for run in runs] == [True, False, True, False]
    assert [(run.queries.start, run.queries.stop) for run in runs] == [(0, 8), (8, 13), (13, 22), (22, 38)]
    assert [(run.keys.start, run.keys.stop) for run in runs] == [(0, 8), (8, 13), (13, 22), (22, 50)]
    assert runs[1].cu_queries.tolist() == [0, 3, 5]
    assert runs[3].cu_keys.tolist() == [0, 20, 21, 28]
    assert (runs[3].max_queries, runs[3].max_keys) == (8, 20)


def test_a_chunk_behind_others_of_its_size_is_a_run_of_its_own_if_kernels_are_built_for_its_length():
    queries = np.array([32, 32, 33, 32])
    keys = np.array([96, 90, 99, 32])
    runs = runs_of(queries, keys, CPU, long=8)
    assert [(run.is_long, run.max_queries) for run in runs] == [(True, 32), (False, 33), (True, 32)]


@pytest.mark.parametrize(
    ("length", "padded"), [(4096, 4096), (4097, 4352), (8191, 8192), (8193, 8704), (16384, 16384), (17, 17), (33, 34)]
)
def test_lengths_are_padded_to_one_of_sixteen_between_two_powers_of_two(length, padded):
    assert padded_length(np.array([length, 1])).tolist() == [padded, 1]
