"""AdamW in float32 over weights and moments that may be kept in bfloat16.

What is kept in bfloat16 loses 16 of its bits after every step. Rounded to the nearest, a weight of 0.02 does not move by less
than 4e-5, and a second moment that decays by less than 0.4% a step never shrinks. So these two are rounded stochastically:
up or down with the probabilities that make the mean exact (Gupta et al. 2015, arXiv 1502.02551). The first moment, of which a
tenth is new in every step, is rounded to the nearest.

The bits that decide are a hash of the step, the gradient and the value itself: nothing has to be stored or seeded, and ranks
that hold the same values, in whatever layout, round them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

STORED: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes by the values of the options."""
PIECE: Final = 2**24
"""Elements that are computed at once where temporaries require memory."""
OF_WEIGHTS, OF_SQUARES = 1, 2


class StochasticRoundingAdamW(torch.optim.AdamW):
    """torch's AdamW with stochastic rounding; its state has the same names. Weights are float32 or bfloat16, whole tensors or
    DTensors."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.moment_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns `step` (float32, on the host) and the moments; creates them if no step has done so."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name, dtype in self.moment_dtypes.items():
                state[name] = torch.zeros_like(parameter, dtype=dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        step_groups(self.param_groups, self.state_of, step_on)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """torch casts moments to the dtype of their weights, which would round float32 ones: they are taken from `state_dict`
        again. As in torch, the state holds the tensors of `state_dict` themselves if dtype and device are equal."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in self.moment_dtypes.keys() & saved.keys():
                self.state[parameter][name] = saved[name].to(parameter.device, self.moment_dtypes[name])


def step_groups(
    groups: Sequence[dict[str, Any]],
    state_of: Callable[[Tensor], dict[str, Tensor]],
    step_on: Callable[[Tensor, dict[str, Tensor], Tensor, Tensor], None],
) -> None:
    """Counts a step of every parameter that has a gradient, and calls `step_on(parameter, state, numbers, salts)` for those of
    which this rank holds elements. numbers, salts: of `update`."""
    for group in groups:
        numbers: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = state_of(parameter)
            # Also on a rank that holds no elements of it: a checkpoint takes the count from any rank.
            state["step"] += 1
            if not local(parameter).numel():
                continue
            at = int(state["step"]), local(parameter).device
            if at not in numbers:
                numbers[at] = numbers_of(group, *at)
            step_on(parameter, state, *numbers[at])


def step_on(parameter: Tensor, state: dict[str, Tensor], numbers: Tensor, salts: Tensor) -> None:
    assert parameter.grad is not None
    mean, square = flat(state["exp_avg"]), flat(state["exp_avg_sq"])
    update_in_pieces(flat(parameter), flat(parameter.grad), mean, square, numbers, salts)


def numbers_of(group: dict[str, Any], step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the arguments `numbers` (6,) float32 and `salts` (2,) int32 of `update`."""
    beta1, beta2 = group["betas"]
    numbers = [
        1 - group["lr"] * group["weight_decay"],
        1 - beta1,
        beta2,
        group["lr"] / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        group["eps"],
    ]
    salts = [salt(step, OF_WEIGHTS), salt(step, OF_SQUARES)]
    return (
        torch.tensor(numbers, dtype=torch.float32, device=device),
        torch.tensor(salts, dtype=torch.int32, device=device),
    )


def update_in_pieces(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: Tensor, salts: Tensor
) -> None:
    """Runs `update`; on a GPU compiled to one kernel without temporaries."""
    if weight.is_cuda:
        compiled_update()(weight, gradient, mean, square, numbers, salts)
        return
    for start in range(0, weight.numel(), PIECE):
        part = slice(start, start + PIECE)
        update(weight[part], gradient[part], mean[part], square[part], numbers, salts)


def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: Tensor, salts: Tensor) -> None:
    """Updates in place, (N,) each. `numbers`: 1 - lr x decay, 1 - beta1, beta2, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t),
    eps."""
    decay, new, beta2, rate, correction, eps = numbers.unbind()
    g = gradient.float()
    m = mean.float()
    m = m + new * (g - m)
    v = beta2 * square.float() + (1 - beta2) * g * g
    w = weight.float() * decay - rate * (m / (v.sqrt() * correction + eps))
    mean.copy_(m)
    square.copy_(v if square.dtype == torch.float32 else rounded(v, g, salts[1]))
    weight.copy_(w if weight.dtype == torch.float32 else rounded(w, g, salts[0]))


@cache
def compiled_update() -> Callable[..., None]:
    return torch.compile(update, dynamic=True)


def rounded(values: Tensor, gradient: Tensor, salt: Tensor) -> Tensor:
    """float32 to bfloat16: rounds to one of the two neighbours, with the probabilities whose mean is the value."""
    bits = values.view(torch.int32)
    # The hash includes the gradient: many weights of a bfloat16 model are equal, and so are their first steps.
    noise = scrambled(scrambled(gradient.view(torch.int32) ^ salt) ^ bits) & 0xFFFF
    return ((bits + noise) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def scrambled(bits: Tensor) -> Tensor:
    """int32; every bit of the input changes every bit of the output with probability near a half. Products wrap; shifts of
    torch keep the sign, so its copies are masked off."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def salt(step: int, of: int) -> int:
    """Returns a different int32 for each step and each stored tensor."""
    mixed = ((step * 2654435761) ^ (of * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**64
    return (mixed >> 32) - 2**31


def flat(tensor: Tensor) -> Tensor:
    """Returns a flat view of this rank's elements."""
    return local(tensor).view(-1)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
