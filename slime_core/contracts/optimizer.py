"""OptimizerConfig: the optimizer's options, by names that every backend understands."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_core.contracts.table import Table


class OptimizerConfig(Table):
    """What every backend understands. The kernel owns these names, whatever the backend calls them."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or plain stochastic gradient descent without momentum (for parity tests)."""
    lr: float = Field(1e-6, gt=0)
    """Highest learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Where decay ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    lr_warmup_iters: int = Field(0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_decay_iters: int | None = Field(None, gt=0)
    """Optimiser steps until min_lr; by default those of the whole run."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled; not applied to vectors (norms, biases)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(1.0, ge=0)
    """Global gradient norm is cut to this; 0: never."""
