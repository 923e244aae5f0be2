"""Work: one micro-batch as this rank computes it.

Legend: N tokens that this rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slime_core.types.microbatch import MicroBatch
from slime_megatron.attention import (
    AttentionPlan,
)
from slime_megatron.delta_net import DeltaPlan
from slime_megatron.prediction import Ahead
from slime_training.head import EntropyMode


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """One micro-batch, this rank's part of it, on the device."""

    micro: MicroBatch
    tokens: Tensor
    """(1, N) with padding."""
    plan: AttentionPlan
    delta: DeltaPlan | None
    """None: the model has no gated delta nets."""
    padding: Tensor
    """(1, N) bool: tokens that stand for none; auxiliary losses of experts leave them out."""
    entropy: EntropyMode = "none"
    ahead: tuple[Ahead, ...] = ()
    """For each layer of multi-token prediction; none where nothing is trained."""
    experts: tuple[Tensor, ...] = ()
    """Whose ids routers go by, for each piece of the model, on the host; none: their own scores'."""

    @property
    def num_tokens(self) -> Tensor:
        """That are there; padding is not."""
        return (~self.padding).sum()
