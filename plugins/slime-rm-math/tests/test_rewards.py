import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.contracts.reward import Reward, RewardValue
from slime_core.errors import RewardError
from slime_rm_math.plugin import Dapo, DeepScaler, Gsm8k, Math

MATH = Math.build(Math.Config())
DAPO = Dapo.build(Dapo.Config())
DEEPSCALER = DeepScaler.build(DeepScaler.Config())
GSM8K = Gsm8k.build(Gsm8k.Config())
ALL = {"math": MATH, "dapo": DAPO, "deepscaler": DEEPSCALER, "gsm8k": GSM8K}


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("5", r"\boxed{5}", 1.0),
        ("5", "5", 0.0),
        ("5", "", 0.0),
        ("5", r"\boxed{}", 0.0),
        ("", r"\boxed{}", 0.0),
        ("", r"\boxed{5}", 0.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
        (r"The answer is $\boxed{\frac{1}{2}}$.", r"\boxed{0.5}", 1.0),
        ("5", r"\boxed{5} no, \boxed{6}", 0.0),
        ("6", r"\boxed{5} no, \boxed{6}", 1.0),
        ("6", r"\boxed{6} no, \boxed{7", 0.0),
        ("7", r"\fbox{7}", 1.0),
        ("7", r"$\boxed 7$", 1.0),
        (5, r"\boxed{5}", 1.0),
        (5.0, r"\boxed{5}", 1.0),
        (0.0000001, r"\boxed{0.0000001}", 1.0),
        (np.int64(5), r"\boxed{5}", 1.0),
        (["4", 5], r"\boxed{5}", 1.0),
        (["4", "6"], r"\boxed{5}", 0.0),
        ([], r"\boxed{5}", 0.0),
        ("(1,2)", r"\boxed{(1,2)}", 1.0),
        ("(1,2)", r"\boxed{[1,2]}", 0.0),
        ("1/2", r"\boxed{\frac{2}{4}}", 0.0),
        ("2", r"\boxed{\frac{4}{2}}", 0.0),
    ],
)
def test_math(make_group: Any, label: Any, response: str, value: float) -> None:
    assert MATH.score(make_group(label, response)) == [value]


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("5", r"<think> \boxed{6} </think> \boxed{5}", 1.0),
        ("5", r"<think> \boxed{5} </think> 5", 0.0),
        ("5", r"<think> \boxed{5}", 0.0),
        ("5", r"\boxed{5}", 0.0),
        ("6", r"a </think> \boxed{5} </think> \boxed{6}", 1.0),
        ("5", r"a </think> \boxed{5} </think> nothing", 0.0),
        ("5", "thoughts ###Response \\boxed{5}", 1.0),
        # The tag comes first where both are there.
        ("5", r"###Response \boxed{5} </think> \boxed{6}", 0.0),
    ],
)
def test_deepscaler(make_group: Any, label: Any, response: str, value: float) -> None:
    assert DEEPSCALER.score(make_group(label, response)) == [value]


def test_deepscaler_with_another_tag(make_group: Any) -> None:
    reward = DeepScaler.build(DeepScaler.Config(think_end="[/THINK]"))
    assert reward.score(make_group("5", r"[/THINK] \boxed{5}", r"</think> \boxed{5}")) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("label", "response", "right"),
    [
        ("34", "Answer: 34", True),
        ("34", "so\nANSWER : $34$.\n", True),
        ("34", "Answer: 33\nAnswer: 34", True),
        ("34", "Answer: 34\nAnswer: 33", False),
        ("34", "Answer:\n34", True),
        ("34", "Answer: 34\nwhich is 33", True),
        ("34", "Answer: 34 which is 33", False),
        ("34", "34", False),
        ("34", "", False),
        ("34", "Answer:", False),
        ("34", r"Answer: $\boxed{34}$", True),
        ("34", "**Answer:** 34", True),
        ("34", "Answer: **34**", True),
        ("34", "Answer: x = 34", True),
        ("34", r"Answer: 34\text{ ways}", True),
        ("34", "Answer: 34 dollars", True),
        ("34", "Answer: 34.0", True),
        ("1234", "Answer: 1,234", True),
        (34, "Answer: 34", True),
        (34.0, "Answer: 34", True),
        ("34.0", "Answer: 34", True),
        ("034", "Answer: 34", True),
        ("-3", "Answer: −3", True),
        # Labels that are no integers are compared as normalized text, never by algebra.
        (r"\frac{1}{2}", "Answer: 1/2", True),
        (r"\frac{1}{2}", "Answer: 0.5", False),
        ("0.5", "Answer: .50", True),
        ("Evelyn", r"Answer: \text{Evelyn}", True),
        ("", "Answer: $", False),
        (["33", "34"], "Answer: 34", True),
        # Only the last 300 characters count.
        ("34", "Answer: 34" + "." * 290, True),
        ("34", "Answer: 34\n" + "x" * 289, True),
        ("34", "Answer: 34\n" + "x" * 290, False),
    ],
)
def test_dapo(make_group: Any, label: Any, response: str, right: bool) -> None:
    expected = {"score": 1.0, "acc": 1.0} if right else {"score": -1.0, "acc": 0.0}
    assert DAPO.score(make_group(label, response)) == [expected]


def test_dapo_trains_on_its_score() -> None:
    assert Dapo.reward_key == "score"
    assert Math.reward_key is None


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("3 * 6 = <<3*6=18>>18\n#### 18", "so\n#### 18", 1.0),
        ("#### 18", r"\boxed{18}", 1.0),
        ("#### 18", "It is 12. No, 18.", 1.0),
        ("#### 18", "It is 18. No, 12.", 0.0),
        ("#### 18", r"#### 18 and \boxed{12}", 0.0),
        ("#### 18", r"#### 12 and \boxed{18}", 1.0),
        ("#### 18", "#### 18\nbecause 3 * 6 = 18, not 12", 1.0),
        ("#### 18", "#### 12\n#### 18", 1.0),
        ("#### 18", "####", 0.0),
        ("#### 18", "#### \n18", 1.0),
        ("#### 18", "#### 18 dollars per day for 2 days", 1.0),
        ("#### 18", "nothing", 0.0),
        ("#### 18", "", 0.0),
        ("#### 18", r"\boxed{x}", 0.0),
        ("#### 18", r"18 \boxed{x}", 0.0),
        ("#### 1,234", "#### 1234", 1.0),
        ("#### 1234", "The total is $1,234.", 1.0),
        ("#### 1234", r"\boxed{\$1{,}234.00}", 1.0),
        ("#### 18", "18.0", 1.0),
        ("#### 18", "18.5", 0.0),
        ("#### -3", "#### -3", 1.0),
        ("#### 3", "#### -3", 0.0),
        ("#### 3", "it is 5-3", 1.0),
        ("#### 18", r"\boxed{18\text{ dollars}}", 1.0),
        ("#### 18", r"\boxed{3 \times 6 = 18}", 1.0),
        ("#### 18", r"\boxed{3 \times 18}", 0.0),
        ("#### 0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("#### 1", r"\boxed{\frac{1}{2}}", 0.0),
        ("#### 1", r"\boxed{\frac{1}{0}}", 0.0),
        ("#### 4", r"\boxed{\sqrt{4}}", 0.0),
        ("18", "18", 1.0),
        (18, "18", 1.0),
        (0.5, "It is .5", 1.0),
        (["#### 17", 18], "18", 1.0),
        ("#### 18", "١٨", 0.0),
        ("#### 18", "18 and " + "9" * 10**5, 0.0),
    ],
)
def test_gsm8k(make_group: Any, label: Any, response: str, value: float) -> None:
    assert GSM8K.score(make_group(label, response)) == [value]


@pytest.mark.parametrize("name", ALL)
def test_one_value_for_each_sample_in_order(make_group: Any, name: str) -> None:
    right, wrong = "</think> Answer: \\boxed{5}", "</think> Answer: \\boxed{6}"
    values = [_number(value) for value in ALL[name].score(make_group("5", right, wrong, "", right))]
    assert [value > 0 for value in values] == [True, False, False, True]
    assert ALL[name].score(make_group("5")) == []


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("label", [None, {"answer": 5}, True, float("nan"), [None], b"5"])
def test_unusable_labels_name_the_prompt(make_group: Any, name: str, label: Any) -> None:
    with pytest.raises(RewardError, match=r"'" + name + r"'.*train\.jsonl:12"):
        ALL[name].score(make_group(label, r"\boxed{5}"))


@pytest.mark.parametrize(
    ("reward", "label"), [(MATH, r"\boxed{5"), (DEEPSCALER, r"\boxed{5"), (GSM8K, "#### none"), (GSM8K, "")]
)
def test_labels_that_cannot_be_read_name_the_prompt(make_group: Any, reward: Reward, label: str) -> None:
    with pytest.raises(RewardError, match=r"train\.jsonl:12"):
        reward.score(make_group(label, r"\boxed{5}"))


MARKS = (
    "\\boxed{",
    "}",
    "{",
    "Answer:",
    "</think>",
    "####",
    "###Response",
    "\n",
    "$",
    "1,234",
    "-",
    ".5",
    "\\frac12",
    "=",
)
PIECES = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.text(max_size=8),
    ),
    max_size=20,
).map("".join)


@given(st.lists(PIECES, max_size=3))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_response_raises(make_group: Any, responses: list[str]) -> None:
    for reward in ALL.values():
        values = reward.score(make_group("12", *responses))
        assert len(values) == len(responses)
        assert all(math.isfinite(_number(value)) for value in values)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "response",
    [
        *(piece * 10**5 for piece in ("{", "\\boxed{", "Answer: ", "####", "1,", "</think>")),
        "\\boxed{" + "9" * 10**6 + "}",
    ],
    ids=lambda response: response[:8],
)
def test_gigantic_responses(make_group: Any, name: str, response: str) -> None:
    value = _number(ALL[name].score(make_group("12", response))[0])
    assert value <= 0


def _number(value: RewardValue) -> float:
    return value["score"] if isinstance(value, Mapping) else value
