"""Answers with their rewards, worked out by hand."""

from __future__ import annotations

from typing import Final

from slime_core.contracts.example import RewardExample

IN_ORDER: Final = (
    "<think>unsure</think><search>tower</search>\n\n<information>Doc 1(Title: Paris) It has one.</information>\n\n"
    "<think>so</think><answer>{}</answer>"
)
RESPONSES: Final = (
    IN_ORDER.format("the Eiffel Tower."),
    IN_ORDER.format("a tower"),
    "<answer>eiffel  tower</answer>",
    "<answer>x</answer> no: <answer>Tour Eiffel</answer>",
    "<information><answer>Eiffel Tower</answer></information>",
    "Eiffel Tower",
)

EXACT_MATCH: Final = (
    RewardExample(label=["Eiffel Tower", "Tour Eiffel"], responses=RESPONSES, rewards=(1.0, 0.2, 0.8, 0.8, 0.0, 0.0)),
    RewardExample(
        label="Eiffel tower",
        responses=RESPONSES,
        rewards=(1.0, 0.0, 1.0, 0.0, 0.0, 0.0),
        options={"format_score": 0.0},
    ),
)
