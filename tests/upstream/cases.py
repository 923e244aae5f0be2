"""Inputs of the functions that are compared with a checkout of upstream slime. Plain data, for both sides."""

from __future__ import annotations

from typing import Any, Final

ANSWERS: Final = (
    "Let me see. hm 4",
    "<answer> 4 </answer>",
    "Thus the answer: Answer: \\boxed{4}",
    "Answer: 5",
    "the Eiffel Tower (B)",
    "",
)
QUESTION: Final = "2+2="
LABELS: Final = {"math": "4", "deepscaler": "4", "dapo": "4", "f1": "the Eiffel Tower", "gpqa": "B"}
SEARCH_LABEL: Final = {"ground_truth": {"target": ["4", "four"]}}
REWARDS: Final = ((0.0, 1.0, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0), (0.25, -1.0, 2.0, 0.0))
"""By group."""
MASKS: Final = ((1, 1, 0, 1, 1), (1, 1, 1), (1, 0), (1, 1, 1, 1))
TRAINED: Final = ((-1.0, -0.5, -2.0, -0.25, -3.0), (-0.1, -0.2, -0.3), (-1.5, -1.0), (-4.0, -0.5, -0.75, -1.0))
SAMPLED: Final = ((-1.5, -0.5, -2.5, -0.75, -1.0), (-0.1, -0.25, -0.2), (-1.0, -1.0), (-0.25, -0.5, -1.5, -1.125))
"""Log-probs of the trainer and of the engine, one row per sample."""
MIS: Final[dict[str, dict[str, Any]]] = {
    "truncate": {"tis_mode": "truncate", "tis_level": "token", "use_rs": False},
    "mask": {"tis_mode": "mask", "tis_level": "sequence", "use_rs": False},
    "clip, rejection": {"tis_mode": "clip", "tis_level": "geometric", "use_rs": True},
}
MIS_COMMON: Final[dict[str, Any]] = {
    "use_tis": True,
    "tis_upper_bound": 2.0,
    "tis_lower_bound": None,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": 4.0,
    "rs_veto_threshold": 1e-3,
    "tis_batch_normalize": False,
}
TIS: Final[dict[str, Any]] = {"tis_clip": 1.5, "tis_clip_low": 0.5}
ROWS: Final = 7
"""Prompts of the data file."""
DRAWS: Final = (3, 5, 4)
"""Prompts that are drawn at a time: into the second epoch."""
CONVERSATIONS: Final = [
    [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}],
]
MAX_NEW_TOKENS: Final = 48
REPLIES: Final = ("Let me see", "<answer> 4 </answer>", "Answer: \\boxed{4}")


def reply_to(token_ids: list[int]) -> str:
    """The text of a response, a function of the tokens that it continues."""
    return REPLIES[(len(token_ids) + sum(token_ids)) % len(REPLIES)]


def log_prob_of(token: int) -> float:
    return -0.125 * (1 + token % 7)
