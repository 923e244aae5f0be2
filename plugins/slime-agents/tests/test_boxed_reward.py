"""The reward of retool; its numbers stand in the examples of its driver."""

import pytest

from slime_agents.boxed_reward import last_box


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("\\boxed{1} \\boxed{ 2 }", "2"),
        ("\\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", None),
        ("boxed{1}", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box(text, held):
    assert last_box(text) == held
