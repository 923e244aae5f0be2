"""A packed micro-batch against a loop over its samples."""

import numpy as np
import pytest
import torch

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.types.batch import TokenColumns

# Uneven lengths; prompts of one token; an empty response; a fully masked sample.
LENGTHS = [(3, 4), (1, 2), (5, 0), (2, 3), (1, 0), (1, 1)]
MASKS = [[1, 0, 1, 1], [1, 1], [], [0, 0, 0], [], [1]]


def looped(batch, samples):
    """The stream, one token at a time."""
    starts_token = np.cumsum([0, *(p + r for p, r in LENGTHS)])
    starts_response = np.cumsum([0, *(r for _, r in LENGTHS)])
    stream = {"tokens": [], "positions": [], "logit_index": [], "targets": [], "segments": [], "mask": [], "rows": []}
    cu_seqlens = [0]
    for number, sample in enumerate(samples):
        prompt, response = LENGTHS[sample]
        tokens = batch.tokens[starts_token[sample] :][: prompt + response].tolist()
        start = len(stream["tokens"])
        for t in range(response):
            # The logits at position P - 1 + t predict response token t.
            stream["logit_index"].append(start + prompt - 1 + t)
            stream["targets"].append(tokens[prompt + t])
            stream["segments"].append(number)
            stream["mask"].append(bool(MASKS[sample][t]))
            stream["rows"].append(int(starts_response[sample]) + t)
        stream["tokens"] += tokens
        stream["positions"] += list(range(len(tokens)))
        cu_seqlens.append(len(stream["tokens"]))
    return stream, cu_seqlens


@pytest.fixture
def batch(make_batch):
    return make_batch(LENGTHS, masks=MASKS)


@pytest.mark.parametrize("samples", [[0, 1, 2, 3, 4, 5], [3, 0], [5, 4, 2, 1], [2], [4, 2], [1]])
def test_packing_against_a_loop(batch, samples):
    column = np.arange(len(batch.mask), dtype=np.float32)
    columns = TokenColumns(advantages=column, loss_weight=column + 100, entropy=column)
    micro = pack_micro_batch(batch, np.array(samples), columns=columns, temperature=0.7)
    stream, cu_seqlens = looped(batch, samples)
    assert micro.tokens.tolist() == stream["tokens"]
    assert micro.position_ids.tolist() == stream["positions"]
    assert micro.cu_seqlens.tolist() == cu_seqlens
    assert micro.max_seqlen == max(sum(LENGTHS[sample]) for sample in samples)
    assert micro.logit_index.tolist() == stream["logit_index"]
    assert micro.targets.tolist() == stream["targets"]
    assert micro.segments.tolist() == stream["segments"]
    assert micro.mask.tolist() == stream["mask"]
    assert micro.num_samples == len(samples)
    assert micro.columns.advantages.tolist() == stream["rows"]
    assert micro.columns.loss_weight.tolist() == [row + 100 for row in stream["rows"]]
    assert micro.columns.rollout_log_probs.tolist() == batch.rollout_log_probs[stream["rows"]].tolist()
    assert micro.columns.old_log_probs is None
    assert micro.temperature == 0.7


def test_the_logits_of_a_target_are_right_before_it(batch):
    micro = pack_micro_batch(batch, np.arange(len(LENGTHS)))
    assert micro.tokens[micro.logit_index + 1].tolist() == micro.targets.tolist()


def test_dtypes(batch):
    micro = pack_micro_batch(batch, np.array([0, 1]))
    assert {micro.tokens.dtype, micro.position_ids.dtype, micro.logit_index.dtype, micro.segments.dtype} == {
        torch.int64
    }
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.mask.dtype == torch.bool
    assert micro.columns.rollout_log_probs.dtype == torch.float32


def test_no_samples_give_one_dummy_token_and_nothing_to_train(batch):
    column = np.ones(len(batch.mask), np.float32)
    micro = pack_micro_batch(batch, np.empty(0, np.int64), columns=TokenColumns(loss_weight=column))
    assert micro.num_tokens == 1
    assert micro.cu_seqlens.tolist() == [0, 1]
    assert micro.max_seqlen == 1
    assert micro.position_ids.tolist() == [0]
    assert micro.num_samples == 0
    for tensor in (micro.logit_index, micro.targets, micro.segments, micro.mask, micro.columns.loss_weight):
        assert tensor.shape == (0,)


def test_shared_read_only_columns_can_be_packed(batch):
    for column in (batch.tokens, batch.mask, batch.rollout_log_probs):
        column.setflags(write=False)
    micro = pack_micro_batch(batch, np.array([3]))
    micro.columns.rollout_log_probs.add_(1)
    assert micro.num_samples == 1


def test_a_batch_can_be_taken_apart_and_its_parts_packed(batch):
    """What a data-parallel rank does with its shard."""
    shard = batch.take(np.array([3, 0, 4]))
    ours = pack_micro_batch(shard, np.array([1, 2]))
    whole = pack_micro_batch(batch, np.array([0, 4]))
    assert ours.tokens.tolist() == whole.tokens.tolist()
    assert ours.targets.tolist() == whole.targets.tolist()
    assert ours.mask.tolist() == whole.mask.tolist()
