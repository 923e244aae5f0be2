"""Need: an input column that a part of an algorithm declares. The kernel computes each declared column once, and no other."""

from __future__ import annotations

from enum import StrEnum


class Need(StrEnum):
    """Its column of `TokenColumns` (ROLLOUT_LOGPROBS: of `Batch`): float32 (M,), in nats (VALUES: in units of reward)."""

    OLD_LOGPROBS = "old_log_probs"
    """Log-probs under the weights before this rollout's training."""
    REF_LOGPROBS = "ref_log_probs"
    """Log-probs under the frozen reference model."""
    TEACHER_LOGPROBS = "teacher_log_probs"
    """Log-probs under the teacher model."""
    VALUES = "values"
    """Values of the critic before this rollout's training."""
    ENTROPY = "entropy"
    """Entropy of the whole distribution at each response token."""
    ROLLOUT_LOGPROBS = "rollout_log_probs"
    """Log-probs as the engine reported them."""
