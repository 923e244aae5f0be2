"""Codes of one byte for the moments of an optimizer: the dynamic map of Dettmers 2015 (arXiv 1511.04561), as bitsandbytes and
torchao have it. Seven decades, of which each larger one has twice as many values.

torchao is no dependency: where it is installed, transformers imports it into every process, which then prints warnings.

Legend: N rows, C elements of a row, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

DECADES: Final = 7
SMALLEST_SCALE: Final = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class CodeMap:
    values: Tensor
    """(256,) float32, ascending, at most 1: the value of each code in units of its block's scale."""
    middles: Tensor
    """(255,) float32: between neighbours."""

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes (N, C) uint8, scales (N, B) float32; returns (N, C) float32."""
        values = self.values[codes.int()].view(*scales.shape, -1)
        return (values * scales[..., None]).view(codes.shape)

    def encode(self, moment: Tensor, codes: Tensor, scales: Tensor) -> None:
        """(N, C) float32, to the nearest codes and the scales of blocks, in place."""
        blocks = moment.view(*scales.shape, -1)
        scales.copy_(blocks.abs().amax(-1).clamp(min=SMALLEST_SCALE))
        found = torch.bucketize(blocks / scales[..., None], self.middles, right=True, out_int32=True)
        codes.copy_(found.view(codes.shape))


@cache
def code_map(*, signed: bool, device: torch.device) -> CodeMap:
    """`signed`: for numbers of both signs."""
    positive = [torch.empty(0)]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        positive.append(10.0 ** (decade + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2)
    parts = [*positive, *(-part for part in positive if signed), torch.tensor([0.0, 1.0])]
    values = torch.cat(parts).sort().values.to(device)
    return CodeMap(values=values, middles=(values[:-1] + values[1:]) / 2)
