"""sgd: stochastic gradient descent without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_core.contracts.optimizer import OptimizerConfig, RoundedState


def make_sgd(
    groups: Sequence[dict[str, Any]], config: OptimizerConfig, rounded: RoundedState | None = None
) -> torch.optim.SGD:
    """See `OptimizerFactory`."""
    return torch.optim.SGD(groups, lr=config.lr, foreach=True)
