"""Rotary positions of a packed stream.

Megatron's own modules count positions from the start of a batch row; here the position of each token is an input, so packing
and context parallelism may change the order of tokens. Legend: N tokens that this rank holds, H heads, D features of a head, R
of them turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime_megatron.bridges.bridge import Rotary
from slime_training.fusion import fused_by_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryCache:
    """Cosines and sines of one micro-batch; built once, used by all layers."""

    cos: Tensor
    """(N, R / 2) float32"""
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, rotary: Rotary) -> RotaryCache:
        """`positions` (N,)"""
        angles = torch.outer(positions.float(), rotary.inv_freq.to(positions.device))
        return cls(cos=angles.cos() * rotary.factor, sin=angles.sin() * rotary.factor)

    def apply_rotary(self, q: Tensor, k: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
        """Rotates (N, H, D) and (N, K, D), of any memory layout."""
        if not q.is_cuda:
            return turned_pair(q, k, self.cos, self.sin, interleaved=interleaved)
        found: tuple[Tensor, Tensor] = fused_by_rows(turned_pair, q, k, self.cos, self.sin, interleaved=interleaved)
        return found


def turned_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return rotated(q, cos, sin, interleaved=interleaved), rotated(k, cos, sin, interleaved=interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotates the first R of D features; pairs are neighbours, or R / 2 apart."""
    apply_rotary, kept = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    one, two = (apply_rotary[..., ::2], apply_rotary[..., 1::2]) if interleaved else apply_rotary.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    # Queries and keys have the same order, so the order of features does not matter.
    return torch.cat([one * cos - two * sin, two * cos + one * sin, kept], dim=-1)


class MLARotary(nn.Module):
    """Replaces the module that Megatron's latent attention calls for angles."""

    def __init__(self, rotary: Rotary, config: TransformerConfig) -> None:
        super().__init__()
        # Not a buffer: half-precision models round those.
        self.inv_freq = rotary.inv_freq
        self.factor = rotary.factor
        self.interleaved = config.rotary_interleaved
        self.gives_factor = getattr(config, "rope_type", "rope") == "yarn"

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Any, config: Any, packed_seq_params: PackedSeqParams, **unused: Any
    ) -> PackedSeqParams:
        """The plan, which Megatron passes on to `forward`."""
        return packed_seq_params

    def forward(self, packed: Any, **unused: Any) -> Tensor | tuple[Tensor, float]:
        """(N, 1, R)"""
        angles = torch.outer(packed.plan.position_ids.float(), self.inv_freq)
        both = torch.stack([angles, angles], -1).flatten(1) if self.interleaved else torch.cat([angles, angles], -1)
        return (both[:, None], self.factor) if self.gives_factor else both[:, None]
