"""OverlongPenalty: reduces the reward of responses close to the length limit."""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import RewardShaper
from slime_core.types.batch import Batch, Float64


class OverlongPenalty(RewardShaper):
    """r + factor x clip(((Lmax - Lc) - R) / Lc, -1, 0) with R trainable tokens, limit Lmax and buffer Lc.

    No penalty up to Lmax - Lc tokens, the full one from Lmax on. Source: arXiv:2503.14476, section 3.4.
    """

    def __init__(self, *, buffer_len: int, penalty_factor: float) -> None:
        self._buffer_len = buffer_len
        self._penalty_factor = penalty_factor

    def shape(self, rewards: Float64, batch: Batch, max_response_len: int) -> Float64:
        free_len = max_response_len - self._buffer_len
        penalty = np.clip((free_len - batch.num_trainable) / self._buffer_len, -1.0, 0.0)
        return rewards + self._penalty_factor * penalty
