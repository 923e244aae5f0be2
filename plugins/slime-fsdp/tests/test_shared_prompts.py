"""A prompt computed once for all its responses: the same log-probs and gradients, and fewer tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_fsdp.prefix_sharing import share_prompts

# Prompt number and response length: groups of 4, 1, 3 and 2; an empty response in the first and nothing else in the
# last, one-token responses, which have no token to be fed, and a prompt that begins like the one before it.
RESPONSES = [(0, 5), (0, 0), (0, 1), (0, 9), (1, 4), (2, 1), (2, 12), (2, 3), (3, 0), (3, 0)]
PROMPTS = [[5, 9, 2, 11, 7, 3, 3], [4], [4, 8, 1, 6], [4, 8, 1, 7]]


@pytest.fixture
def groups(samples):
    generator = torch.Generator().manual_seed(11)
    made = []
    for number, (prompt, length) in enumerate(RESPONSES):
        response = torch.randint(0, 32, (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.8
        if number == 6:
            mask[:] = False
        made.append(
            replace(
                samples[0],
                tokens=torch.cat([torch.tensor(PROMPTS[prompt]), response]),
                prompt=len(PROMPTS[prompt]),
                mask=mask,
                advantage=float(torch.randn((), generator=generator)),
                weight=1 / (len(RESPONSES) * max(int(mask.sum()), 1)),
            )
        )
    return made


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("cut", [[10], [3, 10], [1, 2, 5, 10]], ids=str)
def test_log_probs_and_gradients_equal_float64_transformers(
    family, cut, groups, start, pack, oracle, folders, sgd, weights_of, sequence_policy
):
    """Micro-batches that split groups; mistral's window is shorter than prompt and response."""
    backend = start(folders(family), {"share_prompts": True}, sgd)
    micros = [pack(groups[begin:end]) for begin, end in zip([0, *cut], cut, strict=False)]
    expected = torch.cat(oracle(family)(groups)[0]).detach().numpy()
    found = np.concatenate([scores.log_probs for scores in backend.forward_only(micros)])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    before = weights_of(backend)
    report = backend.train_step(micros, sequence_policy())
    after = weights_of(backend)
    gradients = oracle(family).gradients(groups)
    for name, gradient in gradients.items():
        assert (before[name].double() - after[name].double() - gradient).norm() < 2e-4 * gradient.norm(), name
    assert report.sums["loss"] == pytest.approx(oracle(family).loss(groups).item(), rel=1e-5)


def test_tokens_whose_output_is_not_read_are_left_out(groups, pack):
    """Each prompt once, each response without its last token, and no sample without a response."""
    micro = pack(groups)
    shared, table = share_prompts(micro)
    expected = sum(len(PROMPTS[prompt]) for prompt in (0, 1, 2)) + sum(length - 1 for _, length in RESPONSES if length)
    assert (micro.num_tokens, shared.num_tokens) == (84, expected)
    assert table.query_lengths.sum() == expected
    # Every response's first token is predicted where its prompt ends.
    first = [0, 5, 6, 15, 19, 20, 32]
    assert shared.tokens[shared.logit_index[first]].tolist() == [3, 3, 3, 4, 6, 6, 6]
    assert torch.equal(shared.targets, micro.targets)


@pytest.mark.parametrize("chosen", [[], [1], [0], [0, 4, 5], [1, 8]], ids=str)
def test_without_a_common_prompt_the_stream_is_unchanged(chosen, groups, pack):
    assert share_prompts(pack([groups[number] for number in chosen])) is None


@pytest.mark.bits
def test_the_same_bits_every_time(groups, start, pack, folders, weights_of, sequence_policy):
    """Gradients of a shared prompt are added in a fixed order, with several threads too."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = []
        for _ in range(2):
            backend = start(folders("qwen3"), {"share_prompts": True})
            for _ in range(3):
                backend.train_step([pack(groups * 8)], sequence_policy())
            runs.append(weights_of(backend))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_it_is_off_where_unsupported_and_an_error_if_requested():
    assert FsdpConfig().shares_prompts
    assert not FsdpConfig(attn_implementation="eager").shares_prompts
    assert not FsdpConfig(context_parallel_size=2).shares_prompts
    (problem,) = Fsdp.problems(FsdpConfig(share_prompts=True, context_parallel_size=2), 2, {"model_type": "qwen3"})
    assert problem.startswith("backend.share_prompts = true: requires")
