"""Linear layers through oneDNN: float32 on a CPU.

torch sends small float32 matrix products to MKL, which uses half the vector width of AMD processors. oneDNN, which
torch carries for inductor, uses all of it: measured 210 against 100 GFLOP/s per core for (256, 128) x (128, 384) on
an AMD EPYC with AVX-512. It reads the weight as it is, so loading new weights needs no repacking.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST_ROWS = 32
"""Below this oneDNN's fixed cost of some 10 us per call is more than it saves."""


def onednn_available() -> bool:
    """Whether this build of torch has oneDNN and the operator."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def use_onednn(model: nn.Module) -> None:
    """Replaces the forward of every plain `nn.Linear` in `model`; for inference only."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _onednn_forward(module)  # type: ignore[method-assign, assignment]


def _onednn_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    product = torch.ops.mkldnn._linear_pointwise.default
    fewest = _FEWEST_ROWS * module.in_features

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest:
            return F.linear(x, module.weight, module.bias)
        y: Tensor = product(x, module.weight, module.bias, "none", [], "")
        return y

    return forward
