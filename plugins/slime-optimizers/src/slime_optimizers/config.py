"""Options of the optimizers. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig


class MuonConfig(DriverConfig):
    """Options of Muon. Its learning rate and weight decay are those of the `train` table, and so are the keys of AdamW, which
    steps on all parameters that are no matrices of layers."""

    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the mean of gradients."""
    muon_nesterov: bool = True
    """Look one step ahead: the newest gradient is mixed into the mean once more."""
    muon_steps: int = Field(5, gt=0, lt=100)
    """Newton-Schulz iterations, after which the singular values of an update are near 1."""
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """What the learning rate is multiplied by for a matrix of R rows and C columns. match_rms_adamw: 0.2 sqrt(max(R, C)), so
    that steps are as large as AdamW's and a learning rate of AdamW fits; original: sqrt(max(1, R / C))."""


class EightBitConfig(DriverConfig):
    """Options of AdamW with moments of 8 bits. Its keys are AdamW's, of the `train` table."""

    adamw_8bit_min_elements: int = Field(4096, ge=1)
    """Parameters with fewer elements keep float32 moments, and so do vectors and matrices whose rows do not divide into blocks
    of 32 or more."""
