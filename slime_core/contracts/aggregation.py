"""Aggregation: how per-token losses are reduced to one number, with a denominator counted before the step."""

from __future__ import annotations

from enum import StrEnum


class Aggregation(StrEnum):
    """loss = (1/D) sum over samples i and tokens t of w_i x_t m_t, with D over the whole optimizer step."""

    SEQ_MEAN = "seq_mean"
    """w_i = 1 / trainable tokens of the whole rollout; D = rollouts in the step."""
    TOKEN_MEAN = "token_mean"
    """w_i = 1; D = trainable tokens in the step."""
    CONSTANT = "constant"
    """w_i = 1/L with L = rollout_max_response_len; D = rollouts in the step."""
