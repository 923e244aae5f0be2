"""The zigzag layout, by hand and against a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from slime_core.types.microbatch import LossColumns, MicroBatch, MicroImages
from slime_training.context_parallel import ZigzagSegments, held_positions, segments_of, split_micro_batch
from slime_training.segments import LocalSegments

LENGTHS = [(5, 4), (2, 0), (1, 1), (3, 6)]
"""(prompt, response) of each sequence."""


def micro_batch(lengths: Sequence[tuple[int, int]] = LENGTHS) -> MicroBatch:
    totals = [prompt + response for prompt, response in lengths]
    starts = [sum(totals[:i]) for i in range(len(totals) + 1)]
    tokens = torch.arange(100, 100 + starts[-1])
    index = [
        start + prompt - 1 + t
        for start, (prompt, response) in zip(starts, lengths, strict=False)
        for t in range(response)
    ]
    logit_index = torch.tensor(index)
    return MicroBatch(
        tokens=tokens,
        position_ids=torch.cat([torch.arange(total) for total in totals]),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(totals),
        logit_index=logit_index,
        targets=tokens[logit_index + 1],
        segments=torch.tensor([i for i, (_, response) in enumerate(lengths) for _ in range(response)]),
        num_samples=len(lengths),
        mask=torch.arange(len(index)) % 3 != 0,
        columns=LossColumns(advantages=torch.arange(len(index)).float()),
    )


def test_by_hand():
    # Lengths 9, 2, 2, 9 with two ranks: chunks of 3, 1, 1, 3, padded to 12, 4, 4, 12.
    part = split_micro_batch(micro_batch(), 0, 2)
    assert part.cu_seqlens.tolist() == [0, 12, 16, 20, 32]
    assert part.cu_seqlens.dtype == torch.int32
    assert part.max_seqlen == 12
    # Chunks 0 and 3: of the first sequence its tokens 0, 1, 2 and three of padding.
    assert part.tokens.tolist() == [100, 101, 102, 0, 0, 0, 109, 0, 111, 0, 113, 114, 115, 0, 0, 0]
    assert part.position_ids.tolist() == [0, 1, 2, 8, 8, 8, 0, 1, 0, 1, 0, 1, 2, 8, 8, 8]
    other = split_micro_batch(micro_batch(), 1, 2)
    assert other.tokens.tolist() == [103, 104, 105, 106, 107, 108, 110, 0, 112, 0, 116, 117, 118, 119, 120, 121]
    # Responses of the first sequence are predicted at positions 4 to 7: rank 1 holds 3 to 8.
    assert other.rows.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert part.rows.tolist() == [4, 5]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [LENGTHS, [(5, 4), (9, 18000), (2, 0)]])
def test_every_response_token_is_held_once_with_its_own_position(cp_size, lengths):
    whole = micro_batch(lengths)
    rows = []
    for rank in range(cp_size):
        part = split_micro_batch(whole, rank, cp_size)
        rows += part.rows.tolist()
        assert len(part.tokens) * cp_size == part.cu_seqlens[-1]
        assert part.num_samples == whole.num_samples
        # The token at a local logit position is the one before the target, in the whole stream too.
        assert torch.equal(part.tokens[part.logit_index], whole.tokens[whole.logit_index[part.rows]])
        assert torch.equal(part.position_ids[part.logit_index], whole.position_ids[whole.logit_index[part.rows]])
        assert torch.equal(part.targets, whole.targets[part.rows])
        assert torch.equal(part.segments, whole.segments[part.rows])
        assert torch.equal(part.mask, whole.mask[part.rows])
        assert torch.equal(part.columns.advantages, whole.columns.advantages[part.rows])
        assert part.columns.returns is None
    assert sorted(rows) == list(range(len(whole.targets)))


def test_long_chunks_are_padded_to_lengths_that_kernels_are_built_for():
    # A sixteenth of the way from 4,096 to 8,192 is 256; chunks of 4,503 become 4,608, those of 4,096 stay, short ones too.
    part = split_micro_batch(micro_batch([(9, 18001), (4, 16380), (1, 16379)]), 0, 2)
    assert part.cu_seqlens.diff().tolist() == [4 * 4608, 4 * 4096, 4 * 4095]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_hold_the_padded_stream_between_them(cp_size):
    cu_seqlens = split_micro_batch(micro_batch(), 0, cp_size).cu_seqlens
    held = [held_positions(cu_seqlens, rank, cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(held).tolist()) == list(range(int(cu_seqlens[-1])))
    for rank, positions in enumerate(held):
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            chunk = (end - start) // (2 * cp_size)
            mine = [p - start for p in positions.tolist() if start <= p < end]
            lower, upper = rank * chunk, (2 * cp_size - 1 - rank) * chunk
            assert mine == [*range(lower, lower + chunk), *range(upper, upper + chunk)]


def test_a_dummy_micro_batch_stays_one():
    none = torch.zeros(0, dtype=torch.int64)
    dummy = replace(
        micro_batch(),
        tokens=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        logit_index=none,
        targets=none,
        segments=none,
        mask=none.bool(),
        columns=LossColumns(),
        num_samples=0,
    )
    for rank in range(2):
        part = split_micro_batch(dummy, rank, 2)
        assert part.tokens.tolist() == [0, 0]
        assert part.cu_seqlens.tolist() == [0, 4]
        assert len(part.rows) == 0


def test_a_part_is_not_split_again():
    with pytest.raises(ValueError, match="already"):
        split_micro_batch(split_micro_batch(micro_batch(), 0, 2), 0, 2)


def test_segments_of_a_group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        segments = ZigzagSegments(torch.tensor([0, 0, 2]), 3, group)
        values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
        sums = segments.seq_sum(values)
        assert sums.tolist() == [3, 0, 4]
        spread = segments.expand(sums)
        assert spread.tolist() == [3, 3, 4]
        (spread * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
        assert values.grad.tolist() == [11, 11, 100]
        empty = ZigzagSegments(torch.zeros(0, dtype=torch.int64), 3, group)
        nothing = torch.zeros(0, requires_grad=True)
        empty.expand(empty.seq_sum(nothing)).sum().backward()
        assert nothing.grad.shape == (0,)
    finally:
        dist.destroy_process_group()


def test_positions_of_several_directions_and_features_are_split_with_their_tokens():
    micro = micro_batch()
    length = len(micro.tokens)
    features = torch.where(micro.tokens % 3 == 0, micro.tokens, -1)
    images = MicroImages(pixel_values=torch.zeros(4, 2), grid_thw=torch.tensor([[1, 2, 2]]), feature_of_token=features)
    directions = torch.stack([micro.position_ids, torch.arange(length)])
    seen = []
    for rank in range(2):
        part = split_micro_batch(replace(micro, position_ids=directions, images=images), rank, 2)
        plain = split_micro_batch(micro, rank, 2)
        assert torch.equal(part.position_ids[0], plain.position_ids)
        real = part.tokens != 0
        assert (part.position_ids[1][real] == part.tokens[real] - 100).all()
        of_token = part.images.feature_of_token
        assert torch.equal(of_token, torch.where(real & (part.tokens % 3 == 0), part.tokens, -1))
        seen += of_token[of_token >= 0].tolist()
    assert sorted(seen) == features[features >= 0].tolist()


def test_segments_of_what_a_rank_holds():
    micro = micro_batch()
    assert isinstance(segments_of(micro, None), LocalSegments)
    assert segments_of(micro, None).num_samples == len(LENGTHS)
    assert isinstance(segments_of(micro, object()), ZigzagSegments)
