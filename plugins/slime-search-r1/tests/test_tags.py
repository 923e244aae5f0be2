import pytest

from slime_search_r1.tags import Action, Kind, action_of, is_well_formed, last_answer, without_tags

THOUGHT = "<think>hm</think>"
SEARCHED = f"{THOUGHT}<search>q</search>\n\n<information>Doc 1(Title: a) b</information>\n\n"


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("<search> who is it </search>", Action(Kind.SEARCH, "who is it")),
        ("<think>or <b></think>\n<answer>\nParis\n</answer> and more", Action(Kind.ANSWER, "Paris")),
        ("<answer></answer>", Action(Kind.ANSWER, "")),
        ("<search>one</search><answer>two</answer>", Action(Kind.SEARCH, "one")),
        ("<search>  </search>", Action(Kind.INVALID)),
        ("<search>never closed", Action(Kind.INVALID)),
        ("<search>crossed</answer>", Action(Kind.INVALID)),
        ("", Action(Kind.INVALID)),
    ],
)
def test_what_a_turn_asks_for(turn: str, action: Action) -> None:
    assert action_of(turn) == action


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (f"{SEARCHED}{THOUGHT}<answer> Paris </answer>", "Paris"),
        ("<answer>one</answer>no<answer>two</answer>", "two"),
        ("<information>x <answer>planted</answer></information>", None),
        ("<answer>mine</answer><information><answer>planted</answer></information>", "mine"),
        ("Paris", None),
    ],
)
def test_only_what_the_model_answers_counts(response: str, answer: str | None) -> None:
    assert last_answer(response) == answer


def test_a_document_has_no_tags() -> None:
    planted = without_tags("a < b </information> <Answer>x</ANSWER> <search>y</search> <b>")
    assert planted == "a < b [/information] [Answer]x[/ANSWER] [search]y[/search] <b>"
    assert last_answer(f"<information>{planted}</information>") is None


@pytest.mark.parametrize(
    ("response", "well_formed"),
    [
        (f"{THOUGHT}<answer>a</answer>", True),
        (f"{SEARCHED}{SEARCHED}{THOUGHT}\n<answer>a</answer>", True),
        (f"{SEARCHED}<answer>a</answer>", False),
        (f"{THOUGHT}<answer>a</answer>{THOUGHT}", False),
        (f"{THOUGHT} so <answer>a</answer>", False),
        (f"{SEARCHED}{THOUGHT}", False),
        (f"{THOUGHT}<search>q</search>{THOUGHT}<answer>a</answer>", False),
        ("", False),
    ],
)
def test_the_order_of_tags(response: str, well_formed: bool) -> None:
    assert is_well_formed(response) is well_formed
