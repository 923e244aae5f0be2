"""Linear layers through oneDNN: float32 on a CPU, for backends and engines.

torch sends small float32 matrix products to MKL, which uses half the vector width of AMD processors. oneDNN, which
torch carries for inductor, uses all of it: measured 250 against 100 GFLOP/s per core for (8400, 64) x (64, 256) on an
AMD EPYC with AVX-512, and twice the speed for both gradients. It reads weights as they are, so loading new ones needs
no repacking.

Legend: N rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST_ROWS = 32
"""Rows below which oneDNN's fixed cost of some 10 us per call is more than it saves."""


def onednn_available() -> bool:
    """Whether this build of torch has oneDNN and the operator."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(model: nn.Module) -> None:
    """Replaces the forward of every plain `nn.Linear` in `model`, which must be float32 and on the CPU."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _onednn_forward(module)  # type: ignore[method-assign, assignment]


def _onednn_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    fewest = _FEWEST_ROWS * module.in_features

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest:
            return F.linear(x, module.weight, module.bias)
        if torch.is_grad_enabled():
            y: Tensor = _Linear.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
            return y
        return _product(x, module.weight, module.bias)

    return forward


def _product(x: Tensor, weight_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight_OI, bias, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _product(x, weight_OI, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        (grad,) = grads
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NO, x_NI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            _product(grad, weight_OI.t()) if needs_x else None,
            _weight_gradient(grad_NO, x_NI) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


def _weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """(O, I). For a long N the product is faster with the smaller of the two as its rows."""
    if grad_NO.shape[1] <= x_NI.shape[1]:
        return _product(grad_NO.t(), x_NI.t())
    return _product(x_NI.t(), grad_NO.t()).t()
