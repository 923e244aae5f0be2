"""Plans against brute force: each sample once, caps kept, equal counts, ranks balanced."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.micro_batches import MicroBatchLimits, divide, pack, plan_step

SHAPE = ModelShape(num_layers=3, hidden=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn=40, vocab=100)


QWEN3_4B = ModelShape(num_layers=36, hidden=2560, num_heads=32, num_kv_heads=8, head_dim=128, ffn=9728, vocab=151936)


def plan(lengths, dp_size=1, *, balance=True, samples=None, prompts=None, shape=SHAPE, **limits):
    lengths = np.asarray(lengths, np.int64)
    samples = np.arange(len(lengths)) if samples is None else np.asarray(samples)
    made = plan_step(
        samples,
        lengths,
        dp_size=dp_size,
        limits=MicroBatchLimits(**limits),
        shape=shape,
        balance=balance,
        prompts=None if prompts is None else np.asarray(prompts),
    )
    return [[micro.tolist() for micro in rank] for rank in made.ranks]


def naive_first_fit(lengths, cap):
    bins = []
    for number, length in enumerate(lengths):
        for one in bins:
            if sum(lengths[n] for n in one) + length <= cap:
                one.append(number)
                break
        else:
            bins.append([number])
    return bins


@given(
    lengths=st.lists(st.integers(1, 40), min_size=0, max_size=30),
    dp_size=st.integers(1, 4),
    multiple=st.integers(1, 3),
    max_tokens=st.one_of(st.none(), st.integers(10, 60)),
    balance=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_sample_once_and_equal_counts(lengths, dp_size, multiple, max_tokens, balance):
    ranks = plan(lengths, dp_size, multiple=multiple, max_tokens=max_tokens, max_samples=3, balance=balance)
    micros = [micro for rank in ranks for micro in rank]
    assert sorted(itertools.chain.from_iterable(micros)) == list(range(len(lengths)))
    assert len(ranks) == dp_size
    assert {len(rank) for rank in ranks} == {len(ranks[0])}
    assert len(ranks[0]) > 0
    assert len(ranks[0]) % multiple == 0
    if max_tokens is not None:
        assert all(len(micro) <= 1 or sum(lengths[n] for n in micro) <= max_tokens for micro in micros)
    else:
        assert all(len(micro) <= 3 for micro in micros)
    # An empty micro-batch only where nothing could be split any more.
    if any(not micro for micro in micros):
        assert all(len(micro) <= 1 for micro in micros)


@given(
    lengths=st.lists(st.integers(1, 30), max_size=60),
    cap=st.integers(5, 50),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_packing_is_first_fit_in_order(lengths, cap):
    packed = pack(np.arange(len(lengths)), np.array(lengths, np.int64), MicroBatchLimits(max_tokens=cap))
    assert [one.tolist() for one in packed] == naive_first_fit(lengths, cap)


def test_samples_are_numbers_into_the_lengths_of_the_whole_batch():
    lengths = [100, 4, 100, 3, 100, 2]
    assert plan(lengths, samples=[5, 1, 3], max_tokens=6) == [[[3, 5], [1]]]
    assert plan(lengths, samples=[5, 1, 3], max_tokens=6, balance=False) == [[[5, 1], [3]]]


def test_a_sample_longer_than_the_cap_sits_alone():
    assert plan([3, 20, 3, 3], max_tokens=9) == [[[1], [0, 2, 3]]]
    assert plan([20, 3, 21], max_tokens=9) == [[[1], [2], [0]]]
    assert plan([3, 20, 3, 3], max_tokens=9, balance=False) == [[[0, 2, 3], [1]]]


def test_the_heaviest_bin_is_split_longest_first_into_the_lighter_half():
    bins = [np.array([0, 1]), np.array([2, 3, 4, 5])]
    lengths = np.array([5, 6, 4, 9, 3, 2])
    # 18 tokens: 9 goes left, 4, 3 and 2 right.
    assert [b.tolist() for b in divide(bins, lengths, 3)] == [[0, 1], [3], [2, 4, 5]]
    # 5 left, 4 and 3 right, and 2 left again.
    lengths = np.array([5, 6, 4, 5, 3, 2])
    assert [b.tolist() for b in divide(bins, lengths, 3)] == [[0, 1], [3, 5], [2, 4]]


def test_empty_micro_batches_when_there_are_not_enough_samples():
    assert plan([7, 5, 6], dp_size=4, max_tokens=100, balance=False) == [[[0]], [[2]], [[1]], [[]]]
    assert plan([], dp_size=2, multiple=2, max_tokens=100) == [[[], []], [[], []]]


def test_static_micro_batches_have_a_fixed_number_of_samples():
    assert plan([9, 1, 9, 1], dp_size=2, max_tokens=None, max_samples=2, balance=False) == [[[0, 1]], [[2, 3]]]
    # Three bins for two ranks: one more is split off.
    ranks = plan([5] * 5, dp_size=2, max_tokens=None, max_samples=2, balance=False)
    assert [len(rank) for rank in ranks] == [2, 2]


def test_round_robin_without_balance():
    assert plan([1, 2, 3, 4], dp_size=2, max_tokens=None, balance=False) == [[[0], [2]], [[1], [3]]]


def cost_of(ranks, lengths, shape=SHAPE):
    """FLOPs of a step in which ranks wait for each other after every micro-batch, and the largest sum of a rank."""
    flops = shape.forward_flops(np.asarray(lengths))
    by_rank = np.array([[flops[micro].sum() for micro in rank] for rank in ranks])
    return by_rank.max(axis=0).sum(), by_rank.sum(axis=1).max()


@given(lengths=st.lists(st.integers(1, 100), min_size=2, max_size=6), cap=st.integers(100, 400))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_two_ranks_are_near_the_optimum(lengths, cap):
    """Beside every division of the samples into two micro-batches of at most `cap` tokens."""
    ranks = plan(lengths, dp_size=2, max_tokens=cap)
    divisions = [
        [[n for n in range(len(lengths)) if n in left], [n for n in range(len(lengths)) if n not in left]]
        for size in range(len(lengths) + 1)
        for left in itertools.combinations(range(len(lengths)), size)
    ]
    allowed = [parts for parts in divisions if all(sum(lengths[n] for n in part) <= cap for part in parts)]
    if len(ranks[0]) == 1:
        optimum = min(cost_of([[part] for part in parts], lengths)[0] for parts in allowed)
        assert cost_of(ranks, lengths)[0] <= 4 / 3 * optimum
    else:
        assert not allowed, "one micro-batch for each rank is enough"


LAWS = {
    "log-normal": lambda draw, count: np.clip(draw.lognormal(np.log(2000), 1.0, count), 32, 16384),
    "uniform": lambda draw, count: draw.integers(100, 8192, count),
    "two kinds": lambda draw, count: np.where(
        draw.random(count) < 0.8, draw.integers(200, 1500, count), draw.integers(8000, 16384, count)
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("dp_size", "max_tokens", "most"), [(8, 16384, 0.01), (8, 32768, 0.011), (64, 16384, 0.02)])
def test_no_rank_waits_within_a_step(law, dp_size, max_tokens, most):
    """With 64 ranks, two kinds and a limit that is the longest, even costs of all micro-batches leave 7%."""
    lengths = LAWS[law](np.random.default_rng(0), 2048).astype(np.int64)
    flops = QWEN3_4B.forward_flops(lengths)
    ranks = plan(lengths, dp_size=dp_size, shape=QWEN3_4B, max_tokens=max_tokens)
    together, alone = cost_of(ranks, lengths, QWEN3_4B)
    bound = max(flops.sum() / dp_size, flops.max())
    assert together <= (1 + most) * bound
    assert alone <= (1 + most / 2) * bound
    # What does not fit beside another one of its size needs one of its own.
    fewest = max(int(np.ceil(lengths.sum() / max_tokens)), int((2 * lengths > max_tokens).sum()))
    assert len(ranks[0]) <= -(-fewest // dp_size) / 0.97


def test_samples_of_a_prompt_stay_together_where_that_levels_as_well():
    draw = np.random.default_rng(1)
    prompts = np.repeat(np.arange(64), 8)
    lengths = draw.integers(300, 600, 512)
    alone = plan(lengths, dp_size=4, max_tokens=8192)
    together = plan(lengths, dp_size=4, max_tokens=8192, prompts=prompts)

    def copies(ranks):
        """Prompts that are computed: one for each run of neighbours in a micro-batch."""
        return sum(1 + np.count_nonzero(np.diff(prompts[micro])) for rank in ranks for micro in rank)

    assert copies(together) <= copies(alone) / 2.5
    assert len(together[0]) == len(alone[0])
    assert cost_of(together, lengths)[0] < 1.03 * cost_of(alone, lengths)[0]
    # Two groups for eight ranks: no rank is idle for the sake of a prompt.
    assert all(micro for rank in plan([9] * 16, 8, max_tokens=100, prompts=[0] * 8 + [1] * 8) for micro in rank)


def test_ranks_are_balanced_by_flops_not_by_tokens():
    # Attention is quadratic: one sequence of 400 costs more than two of 200. The long ones must not share a rank.
    lengths = [400, 400, 200, 200, 200, 200, 10, 10]
    ranks = plan(lengths, dp_size=2, max_tokens=400)
    cost = [sum(float(SHAPE.forward_flops(np.array([lengths[n]]))[0]) for m in rank for n in m) for rank in ranks]
    assert max(cost) < 1.05 * min(cost)


def test_flops_of_a_sequence_by_hand():
    shape = ModelShape(num_layers=2, hidden=4, num_heads=2, num_kv_heads=1, head_dim=3, ffn=5, vocab=7)
    tokens = 10
    projections = 2 * tokens * 4 * (6 + 2 * 3 + 6)
    attention = 2 * 2 * 3 * tokens**2
    mlp = 6 * tokens * 4 * 5
    head = 2 * tokens * 4 * 7
    assert shape.forward_flops(np.array([tokens])).tolist() == [2 * (projections + attention + mlp) + head]


def test_linear_attention_does_not_grow_with_the_square():
    config = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 8,
        "intermediate_size": 5,
        "vocab_size": 7,
    }
    plain = ModelShape.from_config(config)
    for layers in (
        {"full_attention_interval": 4},
        {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    ):
        linear = ModelShape.from_config(config | layers)
        less = plain.forward_flops(np.array([10])) - linear.forward_flops(np.array([10]))
        assert less.tolist() == [6 * 2 * 4 * 10**2]


def test_moe_and_nested_configs_give_the_active_width():
    config = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 99,
        "moe_intermediate_size": 3,
        "num_experts_per_tok": 4,
        "vocab_size": 5,
    }
    shape = ModelShape.from_config({"text_config": config})
    assert (shape.ffn, shape.num_kv_heads, shape.head_dim) == (12, 2, 4)


def test_a_plan_is_deterministic():
    lengths = np.random.default_rng(3).integers(1, 500, 200)
    assert plan(lengths, 4, max_tokens=900) == plan(lengths, 4, max_tokens=900)


def test_packing_does_not_grow_with_the_square():
    """Eight times the samples take about nine times as long; a scan of all bins took sixty."""

    def seconds(count):
        lengths = np.random.default_rng(0).integers(200, 1900, count)
        began = time.process_time()
        pack(np.arange(count), lengths, MicroBatchLimits(max_tokens=8192))
        return time.process_time() - began

    assert min(seconds(16384) for _ in range(2)) < 25 * min(seconds(2048) for _ in range(5))
