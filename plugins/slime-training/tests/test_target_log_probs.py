"""Several targets at a position: the head against autograd through the whole matrix, and the stream of prompts by hand."""

import numpy as np
import pytest
import torch

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.types.batch import Batch
from slime_training.context_parallel import split_micro_batch
from slime_training.prompt_stream import prompt_stream
from slime_training.target_log_probs import TargetLogProbs

COUNTS = (3, 1, 0, 4, 2)
"""Targets of each position: none at the third."""


def leaves(positions, *, with_bias=True, rank=0):
    generator = torch.Generator().manual_seed(0)
    shapes = [(positions, 6 + rank), (11, 6), *([(11,)] if with_bias else []), *([(11, rank)] if rank else [])]
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def dense(hidden, weight, bias, added, targets, places, temperature):
    logits = torch.nn.functional.linear(hidden[:, :6], weight, bias)
    if added is not None:
        logits = logits + hidden[:, 6:] @ added.t()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[places, targets], -(log_p.exp() * log_p).sum(-1)[places]


@pytest.mark.parametrize("chunk", [1, 2, 5, 2**62])
@pytest.mark.parametrize(("with_bias", "rank"), [(True, 0), (False, 2)])
def test_values_and_gradients_equal_dense_autograd(chunk, with_bias, rank):
    given = leaves(len(COUNTS), with_bias=with_bias, rank=rank)
    hidden, weight = given[:2]
    bias, added = (given[2], None) if with_bias else (None, given[2])
    places = torch.tensor(np.repeat(np.arange(len(COUNTS)), COUNTS))
    # The same target twice at the fourth position.
    targets = torch.tensor([1, 10, 0, 7, 4, 4, 9, 2, 3, 8])
    scale = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    expected = dense(hidden, weight, bias, added, targets, places, 0.6)
    required = torch.autograd.grad((expected[0] * scale).sum(), given)
    found = TargetLogProbs.apply(hidden, weight, bias, added, targets, places, 0.6, chunk)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1].detach())
    assert not found[1].requires_grad
    torch.testing.assert_close(torch.autograd.grad((found[0] * scale).sum(), given), required)


def test_no_target_keeps_the_graph():
    hidden, weight = leaves(0, with_bias=False)
    none = torch.empty(0, dtype=torch.int64)
    TargetLogProbs.apply(hidden, weight, None, None, none, none, 1.0, 4)[0].sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def packed():
    """Prompts of 3, 1 and 5 tokens with 2, 3 and 1 targets at each position."""
    prompts, counts = np.array([3, 1, 5]), np.array([2, 3, 1])
    targets = prompts * counts
    tokens = [
        np.concatenate([np.arange(100 * n, 100 * n + p), np.arange(-r, 0)])
        for n, (p, r) in enumerate(zip(prompts, targets, strict=True))
    ]
    numbers, flat = np.arange(3), np.zeros(targets.sum())
    batch = Batch(
        index=numbers,
        group_index=numbers,
        rollout_id=numbers,
        credit_key=numbers,
        reward=np.zeros(3),
        truncated=np.zeros(3, np.bool_),
        prompt_length=prompts.astype(np.int32),
        response_length=targets.astype(np.int32),
        tokens=np.concatenate(tokens).astype(np.int32),
        mask=np.ones(len(flat), np.uint8),
        rollout_log_probs=flat.astype(np.float32),
        version=flat.astype(np.int32),
    )
    return prompt_stream(pack_micro_batch(batch, numbers))


def test_the_stream_has_the_prompts_alone():
    micro = packed()
    assert micro.tokens.tolist() == [0, 1, 2, 100, 200, 201, 202, 203, 204]
    assert micro.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert micro.cu_seqlens.tolist() == [0, 3, 4, 9]
    assert micro.max_seqlen == 5
    assert micro.logit_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 5, 6, 7, 8]
    assert micro.targets.tolist() == [-6, -5, -4, -3, -2, -1, -3, -2, -1, -5, -4, -3, -2, -1]


def test_ranks_of_context_parallelism_hold_the_targets_of_their_positions():
    whole = packed()
    parts = [split_micro_batch(whole, rank, 2) for rank in range(2)]
    rows = torch.cat([part.rows for part in parts])
    assert sorted(rows.tolist()) == list(range(len(whole.targets)))
    for part in parts:
        assert (part.logit_index.diff() >= 0).all()
        assert torch.equal(part.tokens[part.logit_index], whole.tokens[whole.logit_index[part.rows]])
        assert torch.equal(part.targets, whole.targets[part.rows])
