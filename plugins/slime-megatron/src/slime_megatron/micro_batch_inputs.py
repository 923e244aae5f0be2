"""MicroBatchInputs: the inputs of one micro-batch on this rank.

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
from slime_megatron.mtp import MTPInputs
from slime_megatron.sequence_balance import Sequences
from slime_training.head import EntropyMode


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchInputs:
    """This rank's part of one micro-batch, on the device."""

    micro: MicroBatch
    tokens: Tensor
    """(1, N) with padding."""
    plan: AttentionPlan
    delta: DeltaPlan | None
    """None: the model has no gated delta nets."""
    padding: Tensor
    """(1, N) bool: True for padding, which auxiliary losses of experts leave out."""
    sequences: Sequences | None
    """None: no balance loss of each sequence is computed."""
    entropy: EntropyMode = "none"
    ahead: tuple[MTPInputs, ...] = ()
    """Inputs of each layer of multi-token prediction; empty if nothing is trained."""
    experts: tuple[Tensor, ...] = ()
    """Expert ids that routers use, for each piece of the model, on the host; empty: routers use their own scores."""

    @property
    def num_tokens(self) -> Tensor:
        """Number of tokens without padding."""
        return (~self.padding).sum()
