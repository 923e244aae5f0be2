"""Optimizers, over a matrix and a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_core.contracts.optimizer import OptimizerConfig, RoundedState
from slime_plugin_kit.case import Case

RATE = 0.01
STEPS = 3


class Trained:
    """Weights, and what steps on them."""

    def __init__(self, case: Case, *, dtype: torch.dtype = torch.float32, rounded: RoundedState | None = None) -> None:
        noise = torch.Generator().manual_seed(1)
        self.driver = case.driver
        self.weights = [torch.randn(shape, generator=noise).to(dtype).requires_grad_() for shape in ((4, 3), (5,))]
        groups: list[dict[str, Any]] = [
            {"params": [weight], "weight_decay": 0.1 if weight.ndim > 1 else 0.0, "hidden": weight.ndim > 1}
            for weight in self.weights
        ]
        config = OptimizerConfig(optimizer=case.entry.name, lr=RATE, weight_decay=0.1)
        self.optimizer: torch.optim.Optimizer = case.build()(groups, config, rounded)

    def step(self, numbers: Sequence[int], rate: float = RATE) -> None:
        """One for each number, which decides the gradient."""
        for number in numbers:
            noise = torch.Generator().manual_seed(number)
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape, generator=noise).to(weight.dtype)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    def states(self) -> list[dict[str, Tensor]]:
        return [dict(self.driver.state_of(self.optimizer, weight)) for weight in self.weights]


def require_equal(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"{what}: other weights"


def test_a_step_repeats_to_the_bit(case: Case) -> None:
    one, other = Trained(case), Trained(case)
    start = one.values()
    one.step(range(STEPS))
    other.step(range(STEPS))
    moved = [not torch.equal(a, b) for a, b in zip(one.values(), start, strict=True)]
    assert all(moved), "steps change nothing"
    require_equal("the same steps again", other.values(), one.values())


def test_the_learning_rate_is_that_of_the_groups(case: Case) -> None:
    trained = Trained(case)
    start = trained.values()
    trained.step(range(STEPS), rate=0.0)
    require_equal("steps at lr = 0", trained.values(), start)


def test_saved_and_loaded_it_continues_to_the_bit(case: Case) -> None:
    straight, saved, loaded = Trained(case), Trained(case), Trained(case)
    straight.step(range(2 * STEPS))
    saved.step(range(STEPS))
    for weight, value, state in zip(loaded.weights, saved.values(), saved.states(), strict=True):
        for name, tensor in state.items():
            assert isinstance(tensor, Tensor), f"its state {name} is {tensor!r}, and a checkpoint takes tensors alone"
            assert "." not in name, f'its state "{name}" has a dot in its name'
            loaded.optimizer.state[weight][name] = tensor.clone()
        weight.data.copy_(value)
    loaded.step(range(STEPS, 2 * STEPS))
    require_equal(f"{STEPS} steps, its state in a new one, and {STEPS} steps", loaded.values(), straight.values())


def test_its_moments_are_as_declared(case: Case) -> None:
    trained = Trained(case)
    trained.step([0])
    for weight, state in zip(trained.weights, trained.states(), strict=True):
        held = [name for name, tensor in state.items() if tensor.shape == weight.shape]
        assert len(held) == len(case.driver.moments), f"it declares {case.driver.moments}, and holds {held}"


def test_bfloat16_stays_bfloat16(case: Case) -> None:
    rounded = RoundedState(exp_avg="bf16", exp_avg_sq="bf16")
    trained = Trained(case, dtype=torch.bfloat16, rounded=rounded)
    start = trained.values()
    trained.step(range(STEPS))
    kept = [weight.data for weight in trained.weights]
    kept += [tensor for state in trained.states() for tensor in state.values() if tensor.ndim]
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept), f"it keeps {sorted({str(t.dtype) for t in kept})}"
    assert not any(torch.equal(a, b) for a, b in zip(trained.values(), start, strict=True)), "steps change nothing"
