"""Need: an input that a part of an algorithm declares. The kernel computes what is declared once, and nothing else."""

from __future__ import annotations

from enum import StrEnum


class Need(StrEnum):
    """Each value names the column of `TokenColumns` (or of `Batch`) that it fills."""

    OLD_LOGPROBS = "old_log_probs"
    """Under the weights at the start of this rollout's training."""
    REF_LOGPROBS = "ref_log_probs"
    """Under the frozen reference."""
    TEACHER_LOGPROBS = "teacher_log_probs"
    VALUES = "values"
    """The critic's, before this rollout's training."""
    ENTROPY = "entropy"
    """Of the full distribution at each response token."""
    ROLLOUT_LOGPROBS = "rollout_log_probs"
    """As the engine reported them."""
