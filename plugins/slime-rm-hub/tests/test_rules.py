"""Rewards by rules: numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core.errors import RewardError
from slime_rm_hub.plugin import F1, Gpqa, IfBench, Random

F1_REWARD = F1.build(F1.Config())
GPQA = Gpqa.build(Gpqa.Config())


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("Jane Austen", "jane austen", 1.0),
        ("Jane Austen", "Austen, Jane", 1.0),
        ("Jane Austen", "the novelist Jane Austen", 2 * 2 / (3 + 2)),
        ("a b b", "b b b", 2 * 2 / (3 + 2)),  # "a" is an article
        ("the", "the", 0.0),
        ("yes", "yes it is", 0.0),
        ("yes", "Yes.", 1.0),
        ("it is no", "no", 0.0),
        ("no way", "no way", 1.0),
        ("noanswer", "noanswer", 1.0),
        (["Paris", "city of light"], "the City of Light!", 1.0),
        (1984, "1984", 1.0),
        ("", "", 0.0),
        ("x", "", 0.0),
    ],
)
def test_f1(make_group: Any, label: Any, response: str, value: float) -> None:
    assert F1_REWARD.score(make_group(label, response)) == [pytest.approx(value)]


@pytest.mark.parametrize(
    ("label", "metadata", "response", "value"),
    [
        ("C", {}, "the answer is C", 1.0),
        ("C", {}, "the answer is Cold", 0.0),
        ("C", {}, "ANSWER: c", 0.0),
        ("c", {}, "Choice: (C).", 1.0),
        ("C", {}, "The final answer is $\\boxed{\\text{C}}$", 1.0),
        ("C", {}, "Answer: A. No: answer: C", 1.0),
        ("C", {}, "The answer is C, because D is wrong", 1.0),
        ("C", {}, "A? B? C!", 1.0),
        ("C", {}, "C? B? A!", 0.0),
        ("C", {}, "so: C</think> the answer is D", 0.0),
        ("J", {}, "J", 1.0),
        ("k", {"valid_letters": ["k", "l"]}, "K is correct", 1.0),
        (0, {}, "A", 1.0),
        (3, {"choices": ["x", "y", "z", "u"]}, "D", 1.0),
        ("sodium chloride", {"choices": ["water", "Sodium-Chloride"]}, "B", 1.0),
        ("sodium chloride", {"choices": {"A": "water", "B": "Sodium chloride"}}, "A", 0.0),
        ("sodium chloride", {}, "it must be sodium chloride", 1.0),
        ("sodium chloride", {}, "it must be sodium", 0.0),
        ("B", {"choices": ["water", "salt"]}, "salt, of course", 1.0),
        ("B", {"choices": ["water", "salt"]}, "saltpetre", 0.0),
        ("B", {}, "", 0.0),
    ],
)
def test_gpqa(make_group: Any, label: Any, metadata: dict[str, Any], response: str, value: float) -> None:
    assert GPQA.score(make_group(label, response, metadata=metadata)) == [value]


@pytest.mark.parametrize("label", [None, "", 10, -1, True, 1.5, ["A"]])
def test_unusable_labels_name_the_prompt(make_group: Any, label: Any) -> None:
    with pytest.raises(RewardError, match=r"'gpqa': train\.jsonl:12"):
        GPQA.score(make_group(label, "A"))
    with pytest.raises(RewardError, match="it must be a letter of A, B, its number"):
        GPQA.score(make_group("J", "J", metadata={"valid_letters": ["A", "B"]}))
    if label is None or label is True:
        with pytest.raises(RewardError, match=r"'f1': train\.jsonl:12"):
            F1_REWARD.score(make_group(label, "A"))


def test_with_boxed_only_the_last_box_is_graded(make_group: Any) -> None:
    reward = Gpqa.build(Gpqa.Config(boxed=True, think_end="[/t]"))
    responses = ("\\boxed{A}[/t] \\boxed{B} \\boxed{A", "B", "[/t]\\boxed{A}\\fbox{{B}}")
    assert reward.score(make_group("B", *responses)) == [1.0, 0.0, 1.0]


def test_random_rewards_depend_on_seed_and_sample(make_group: Any) -> None:
    group = make_group(None, *["x"] * 2000)
    draws = list(Random.build(Random.Config()).score(group))
    assert set(draws) == {0.0, 1.0}
    assert abs(sum(draws) - 1000) < 100
    assert Random.build(Random.Config()).score(group) == draws
    assert sum(a == b for a, b in zip(Random.build(Random.Config(seed=1)).score(group), draws, strict=True)) < 1100


IFEVAL = {
    "instruction_id_list": [
        "length_constraints:number_words",
        "keywords:forbidden_words",
        "startend:end_checker",
        "combination:repeat_prompt",
    ],
    "kwargs": [
        {"num_words": 3, "relation": "at least", "capital_frequency": None},
        {"forbidden_words": ["rain"]},
        {"end_phrase": "the end"},
        {"prompt_to_repeat": "Name it"},
    ],
}


def test_ifbench_checks_every_instruction(make_group: Any) -> None:
    reward = IfBench.build(IfBench.Config())
    assert IfBench.reward_key == "score"
    group = make_group(
        None,
        "Name it: sun, the end",
        "hm</think>Name it: sun, the end",
        "Name it: rain, the end",
        "rain",
        "",
        metadata=IFEVAL,
    )
    assert [value["score"] for value in reward.score(group)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [value["followed"] for value in reward.score(group)] == [1.0, 1.0, 0.75, 0.0, 0.0]


def test_ifbench_reports_what_the_data_lacks(make_group: Any) -> None:
    reward = IfBench.build(IfBench.Config())
    for metadata, states in (
        ({}, "has no metadata.instruction_id_list"),
        ({"instruction_id_list": []}, "has no metadata.instruction_id_list"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
            "has 1 instructions, and metadata.kwargs",
        ),
    ):
        with pytest.raises(RewardError, match=rf"'ifbench': train\.jsonl:12 {states}"):
            reward.score(make_group(None, "x", metadata=metadata))


def test_ifbench_never_downloads(make_group: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkers read data of NLTK. If it is missing, the error names the command; otherwise they work by their names."""
    import nltk

    from slime_rm_hub import ifbench

    def refuse(*names: object, **options: object) -> None:
        raise AssertionError(f"it downloads {names}")

    monkeypatch.setattr(nltk, "download", refuse)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    reward = IfBench.build(IfBench.Config())
    palindrome = {"instruction_id_list": ["format:no_whitespace"]}
    with pytest.raises(RewardError, match=r"python -m nltk\.downloader punkt punkt_tab .* stopwords"):
        reward.score(make_group(None, "x", metadata=palindrome))
    for path in ifbench.NLTK_DATA.values():
        (tmp_path / path).mkdir(parents=True)
    ifbench.ifbench_checkers.cache_clear()
    values = reward.score(make_group(None, "nospace", "a space", metadata=palindrome))
    assert [value["score"] for value in values] == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"unknown instruction; close match: format:no_whitespace"):
        reward.score(make_group(None, "x", metadata={"instruction_id_list": ["format:no_whitespaces"]}))
