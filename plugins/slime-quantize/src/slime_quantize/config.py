"""Options of the quantizing converters. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig

KEPT: Final = (r"^lm_head$", r"(^|\.)embed_tokens$", r"\.gate$", r"shared_expert_gate$", r"\.eh_proj$", r"shared_head")
"""Head, embedding, routers and what belongs to multi-token prediction's own input and head."""


class QuantizeConfig(DriverConfig):
    ignore: tuple[str, ...] = KEPT
    """Regular expressions: linear layers whose name has a match keep their weights as they are."""


class Fp8Config(QuantizeConfig):
    strategy: Literal["block", "channel", "tensor"] = "block"
    """What shares a scale: a block of `block_size` squared (DeepSeek's layout), an output channel, or the whole matrix."""
    block_size: int = Field(128, gt=0)
    """Rows and columns of a block, for the strategy `block`."""


class Int4Config(QuantizeConfig):
    group_size: int = Field(128, gt=0)
    """Neighbouring inputs of one output channel that share a scale."""
