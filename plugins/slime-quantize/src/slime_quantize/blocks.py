"""BlockScheme: float8 with a float32 scale for each block, called `weight_scale_inv`, as in the weights of DeepSeek-V3.

compressed-tensors makes the same of one matrix (a test compares them), in three times as many operations; here thousands of
experts are quantized together, between two steps of a run.

Legend: N matrices, O output channels, I inputs, B block size, P and Q blocks down and across.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from slime_quantize.scheme import Scheme

FLOAT8: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(FLOAT8).max
OF_ZEROS: Final = torch.finfo(torch.float32).eps
"""Scale of a block that has nothing else."""
TOGETHER: Final = 2**27
"""Elements of matrices that are quantized at once; float32 copies of them are made."""


@dataclass(frozen=True)
class BlockScheme(Scheme):
    size: int

    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.size, self.size],
            "modules_to_not_convert": list(kept),
        }

    def quantized(self, weight_OI: Tensor) -> Mapping[str, Tensor]:
        weight, scale = self.of_stack(weight_OI[None])
        return {"weight": weight[0], "weight_scale_inv": scale[0]}

    def of_all(self, weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Weight and scales of each: those of one shape together, since a model may have thousands of small experts."""
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = {}
        for name, weight in weights.items():
            alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(name)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for (shape, *_), names in alike.items():
            count = max(TOGETHER // max(shape.numel(), 1), 1)
            for start in range(0, len(names), count):
                some = names[start : start + count]
                # One alone is large, and is not copied.
                stack = torch.stack([weights[name] for name in some]) if len(some) > 1 else weights[some[0]][None]
                made = self.of_stack(stack)
                found |= dict(zip(some, zip(*made, strict=True), strict=True))
        return found

    def of_stack(self, weights_NOI: Tensor) -> tuple[Tensor, Tensor]:
        """(N, O, I) float8 e4m3 and (N, P, Q) float32: the largest magnitude of a block over the format's largest number."""
        size, (_, outputs, inputs) = self.size, weights_NOI.shape
        missing = (0, -inputs % size, 0, -outputs % size)
        # It copies where nothing is missing, too.
        padded = torch.nn.functional.pad(weights_NOI, missing) if any(missing) else weights_NOI
        blocks_NPBQB = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size))
        largest_NPQ = torch.maximum(blocks_NPBQB.amax((2, 4)), -blocks_NPBQB.amin((2, 4))).float()
        scale_NPQ = torch.where(largest_NPQ == 0, OF_ZEROS, largest_NPQ / LARGEST)
        steps = blocks_NPBQB / scale_NPQ[:, :, None, :, None]
        whole = steps.to(FLOAT8).flatten(3, 4).flatten(1, 2)
        return whole[:, :outputs, :inputs].contiguous(), scale_NPQ
