"""Packed attention against a loop over queries, in float64."""

import numpy as np
import pytest
import torch

from slime_fsdp.attention import attend_blocks, block_cuts, plan_attention
from slime_training.segment_table import whole_sequences, zigzag_part

CPU = torch.device("cpu")


def oracle(q, k, v, scale, window, positions, keys_of):
    """`positions` (N,): of each query in the whole stream. `keys_of`: the keys that it may see. Plain loops."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    repeats = q.shape[1] // k.shape[1]
    for n, position in enumerate(positions):
        seen = [j for j in keys_of[n] if j <= position and (window is None or j > position - window)]
        for head in range(q.shape[1]):
            weight = (k[seen, head // repeats] @ q[n, head] * scale).softmax(0)
            out[n, head] = weight @ v[seen, head // repeats]
    return out


def tensors(num_queries, num_keys):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(size, heads, width, dtype=torch.float64, generator=generator).requires_grad_()
        for size, heads, width in ((num_queries, 4, 8), (num_keys, 2, 8), (num_keys, 2, 6))
    ]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [1], [1, 30, 2, 11, 3, 12]], ids=str)
def test_blocks_equal_a_loop(lengths, window):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    q, k, v = tensors(offsets[-1], offsets[-1])
    plan = plan_attention(whole_sequences(torch.tensor(offsets, dtype=torch.int32)), device=CPU, varlen=False)
    found = attend_blocks(q, k, v, plan, 0.3, window)
    keys_of = [range(offsets[i], offsets[i + 1]) for i, length in enumerate(lengths) for _ in range(length)]
    expected = oracle(q, k, v, 0.3, window, range(offsets[-1]), keys_of)
    torch.testing.assert_close(found, expected)
    shape = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    given = torch.autograd.grad((found * shape).sum(), (q, k, v))
    torch.testing.assert_close(given, torch.autograd.grad((expected * shape).sum(), (q, k, v)))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("cp_rank", [0, 1, 2])
def test_zigzag_plans_show_each_query_its_keys(cp_rank, varlen):
    """With three ranks; keys are numbered by their position in the concatenation of the ranks' parts."""
    cp_size, lengths = 3, [12, 6, 30]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    held = []
    for rank in range(cp_size):
        for start, length in zip(starts, lengths, strict=False):
            chunk = length // 6
            for c in (rank, 5 - rank):
                held += range(start + c * chunk, start + (c + 1) * chunk)
    held = np.array(held).reshape(cp_size, -1)
    table = zigzag_part(torch.tensor(starts, dtype=torch.int32), cp_rank, cp_size)
    plan = plan_attention(table, device=CPU, varlen=varlen)
    positions = held[cp_rank]
    sequence = np.searchsorted(starts, positions, side="right") - 1
    if varlen:
        # The kernel aligns a segment's last query with its last key.
        (run,) = plan.runs
        assert run.cu_queries[-1] == len(positions)
        rows = plan.key_rows.numpy()
        keys = held.ravel()[rows]
        # At most twice: in a sequence's chunk near its start and in the one near its end.
        assert len(plan.key_places) == 2
        assert sorted(place for row in plan.key_places.tolist() for place in row if place >= 0) == list(
            range(len(rows))
        )
        assert all(
            rows[place] == key for row in plan.key_places.tolist() for key, place in enumerate(row) if place >= 0
        )
        for a, b, c, d in zip(run.cu_queries[:-1], run.cu_queries[1:], run.cu_keys[:-1], run.cu_keys[1:], strict=True):
            assert keys[c:d].tolist() == list(range(starts[sequence[a]], positions[b - 1] + 1))
        assert (run.max_queries, run.max_keys) == (5, 30 - 5 * cp_rank)
        return
    q, k, v = tensors(len(positions), starts[-1])
    places = {int(position): place for place, position in enumerate(held.ravel())}
    order = [places[position] for position in range(starts[-1])]
    found = attend_blocks(q, k, v, plan, 0.3, None)
    keys_of = [range(starts[s], starts[s + 1]) for s in sequence]
    torch.testing.assert_close(found, oracle(q, k[order], v[order], 0.3, None, positions, keys_of))


def test_blocks_waste_little():
    lengths = np.sort(np.random.default_rng(0).integers(1, 300, 400))[::-1]
    parts = np.split(lengths, block_cuts(lengths, lengths, np.full(400, True)))
    assert len(parts) < 20
    assert sum(len(part) * part.max() for part in parts) < 1.25 * lengths.sum()
