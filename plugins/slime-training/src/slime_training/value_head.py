"""The head of a critic that starts from a language model."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def start_value_head(weight_1H: Tensor, bias_1: Tensor | None, seed: int) -> None:
    """In place: weights from N(0, 1/(H + 1)), bias 0, as Stiennon et al. 2020 (arXiv 2009.01325, appendix B.1). Drawn in
    float32 on the host, wherever and in whatever they are."""
    fresh_1H = torch.empty(weight_1H.shape, dtype=torch.float32, device="cpu")
    fresh_1H.normal_(0.0, (weight_1H.shape[1] + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    weight_1H.copy_(fresh_1H)
    if bias_1 is not None:
        bias_1.zero_()
