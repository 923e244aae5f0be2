"""A micro-batch without memory in a model that FSDP shards, also on one rank: nothing of the step is left in FSDP, and the next
one equals that of a backend which never failed. Without FSDP, the contract kit tests the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_core.contracts.backend import OutOfDeviceMemory

TOO_MANY = 2**60


class NoMemory(torch.autograd.Function):
    """The identity, whose backward finds no memory."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.empty(TOO_MANY, dtype=torch.uint8)


@pytest.fixture
def fails(sequence_policy):
    """`fails(where, most)`: an objective without memory for more than `most` tokens."""

    def policy(where, most):
        inner = sequence_policy()

        class Failing(sequence_policy):
            def __call__(self, micro, **columns):
                result = inner(micro, **columns)
                if len(micro.targets) <= most:
                    return result
                if where == "forward":
                    torch.empty(TOO_MANY, dtype=torch.uint8)
                return replace(result, loss=NoMemory.apply(result.loss))

        return Failing()

    return policy


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"precision": "bfloat16", "main_params_dtype": "bf16"}])
def test_the_next_step_is_that_of_a_backend_that_never_failed(
    options, where, start, folders, pack, samples, sequence_policy, weights_of, fails
):
    parts = [pack(samples[:5]), pack(samples[5:]), pack(samples[4:5])]
    straight = start(folders("qwen3"), options)
    expected = [straight.train_step(parts, sequence_policy()) for _ in range(2)]
    weights = weights_of(straight)
    straight.close()

    backend = start(folders("qwen3"), options)
    # Two micro-batches have left gradients: the third has more tokens than they.
    with pytest.raises(OutOfDeviceMemory, match="can't allocate memory") as caught:
        backend.train_step([parts[1], parts[2], parts[0]], fails(where, len(parts[1].targets)))
    assert caught.value.number == 2
    for straight_report in expected:
        report = backend.train_step(parts, sequence_policy())
        assert (report.grad_norm, report.sums) == (straight_report.grad_norm, straight_report.sums)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(backend).items())


def test_other_errors_keep_their_class(start, folders, pack, samples, sequence_policy):
    class Broken(sequence_policy):
        def __call__(self, micro, **columns):
            raise RuntimeError("shape '[3]' is invalid")

    with pytest.raises(RuntimeError, match="shape"):
        start(folders("qwen3")).train_step([pack(samples)], Broken())
