"""Sampling a batch with top-k and top-p: what is kept, and that a row's draw is its own."""

import sys
import types

import numpy as np
import pytest
import torch

from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_sglang.features import Features
from slime_sglang.requests import SglangRequests
from slime_sglang.server.seeded_sampling import draw_by_token

ALL = 1 << 30
"""SGLang's word for no top-k."""


@pytest.fixture
def kept(monkeypatch):
    """The probabilities that SGLang's plain sampler gets; it returns the token of the row's seed, or the likeliest."""
    seen = []

    def sampling_from_probs_torch(probs, sampling_seed=None, positions=None):
        seen.append(probs.clone())
        column = sampling_seed % probs.shape[1]
        held = probs.gather(1, column[:, None])[:, 0] > 0
        return torch.where(held, column, probs.argmax(-1)).to(torch.int32)

    sampler = types.SimpleNamespace(sampling_from_probs_torch=sampling_from_probs_torch)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.sampler", sampler)
    return seen


def draw(probs, top_ks, top_ps, seeds, **more):
    def original(*args, **kwargs):
        return "SGLang's own"

    rows = torch.tensor(probs, dtype=torch.float32)
    seed = None if seeds is None else torch.tensor(seeds)
    positions = torch.arange(len(rows))
    return draw_by_token(
        original,
        rows,
        torch.tensor(top_ks),
        torch.tensor(top_ps),
        torch.zeros(len(rows)),
        False,
        seed,
        positions,
        **more,
    )


def test_kept_probabilities_stay_in_token_order(kept):
    row = [0.1, 0.4, 0.2, 0.3]
    tokens = draw([row] * 4, [ALL, 1, 2, ALL], [1.0, 1.0, 1.0, 0.65], [0, 0, 3, 2])
    # By hand. Of top-p 0.65 the third likeliest goes too far: 0.4 + 0.3 are above it.
    expected = [row, [0, 0.4, 0, 0], [0, 0.4, 0, 0.3], [0, 0.4, 0, 0.3]]
    np.testing.assert_array_equal(kept[0].numpy(), np.array(expected, np.float32))
    assert tokens.tolist() == [0, 1, 3, 1]


def test_without_a_top_p_the_tail_stays(kept):
    # In float32 the sum before the last of these is above 1.
    row = np.full(3001, 1 / 3000 * 1.0005, np.float32)
    row[-1] = 1e-9
    draw([row.tolist()], [ALL], [1.0], [0])
    assert (kept[0] > 0).all()


def test_of_equal_ones_a_greedy_request_takes_the_first(kept):
    assert draw([[0.01] * 100] * 2, [1, 1], [1.0, 1.0], [7, 8]).tolist() == [0, 0]


def test_filtered_probabilities_are_returned(kept):
    tokens, ranked, order, weight = draw([[0.1, 0.4, 0.2, 0.3]], [2], [1.0], [3], return_filtered_probs=True)
    assert tokens.tolist() == [3]
    assert order.tolist() == [[1, 3, 2, 0]]
    np.testing.assert_array_equal(ranked.numpy(), np.array([[0.4, 0.3, 0, 0]], np.float32))
    assert weight.tolist() == [np.float32(0.3)]


def test_without_seeds_it_is_left_to_sglang(kept):
    assert draw([[0.5, 0.5]], [1], [1.0], None) == "SGLang's own"


def test_a_penalty_is_refused():
    check = SglangRequests(vocab_size=25, has_tokenizer=True, features=Features(), image_tokens=None, experts=None)

    def problem(**sampling):
        params = SamplingParams(max_new_tokens=2, **sampling)
        asked = GenerateRequest(request_id="a", token_ids=np.array([5], np.int32), sampling=params, seed=1)
        return check.problem([asked], ())

    assert problem() is None
    assert 'it has no guided decoding (structural_tag): set engine.grammar_backend = "xgrammar"' in problem(
        structural_tag="{}"
    )
    assert "repetition_penalty = 1.2: SGLang penalizes only the tokens that it generated" in problem(
        repetition_penalty=1.2
    )
