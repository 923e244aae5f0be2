"""Examples for the contract kit."""

from __future__ import annotations

from slime_core.contracts.example import RewardExample

_SUM = "What is 2 + 2?"

MATH = (
    RewardExample(
        prompt=_SUM,
        label="4",
        responses=("So it is \\boxed{4}.", "\\boxed{5}", "4", "", "\\boxed{5} no, \\boxed{ 4 }", "\\boxed{4"),
        rewards=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
    ),
    RewardExample(
        options={"max_symbolic_chars": 0},
        prompt=_SUM,
        label=["4", "four"],
        responses=("\\boxed{four}", "\\boxed{4}", "\\boxed{2+2}"),
        rewards=(1.0, 1.0, 0.0),
    ),
)

DEEPSCALER = (
    RewardExample(
        prompt=_SUM,
        label="4",
        responses=(
            "<think>hm</think> \\boxed{4}",
            "<think>\\boxed{4}",
            "\\boxed{4}",
            "<think>\\boxed{4}</think> \\boxed{5}",
            "",
        ),
        rewards=(1.0, 0.0, 0.0, 0.0, 0.0),
    ),
)

DAPO = (
    RewardExample(
        prompt=_SUM,
        label="4",
        responses=("Answer: 4", "Answer: 5", "4", "", "Answer: 4\nAnswer: \\boxed{5}", "answer: $x = 4.0$"),
        rewards=(1.0, -1.0, -1.0, -1.0, -1.0, 1.0),
    ),
)

GSM8K = (
    RewardExample(
        prompt=_SUM,
        label="2 + 2 = 4\n#### 4",
        responses=("2 and 2 make 4", "#### 4", "#### 5", "", "it is 4, not 5", "$4.00"),
        rewards=(1.0, 1.0, 0.0, 0.0, 0.0, 1.0),
    ),
)
