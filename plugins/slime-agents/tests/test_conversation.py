"""Branches of an agent's calls: clean, realigned, forked."""

import numpy as np
import pytest
from agents_speaker import decode, encode

from slime_agents.served.conversation import Conversation
from slime_core.types.completion import Completion, FinishReason


def completion(text):
    # Other tokens than the tokenizer would choose: whoever tokenises again is found out.
    return Completion(
        request_id="r", token_ids=1000 + encode(text), log_probs=-np.ones(len(text), np.float32),
        finish_reason=FinishReason.STOP, spans=(),
    )  # fmt: skip


@pytest.fixture
def talk():
    made = Conversation(encode, fork_threshold=5)

    def call(text, answer):
        branch = made.place(text)
        asked = branch.token_ids
        made.answer(branch, answer, completion(answer))
        return asked

    made.call = call
    return made


def shown(conversation):
    """Texts of every branch: the prompt, then [answers] and others' words."""
    return [
        [piece.text if piece.completion is None else [piece.text] for piece in branch.pieces]
        for branch in conversation.branches
    ]


def tokens(*texts):
    """`[answer]` in the engine's own tokens, words in the tokenizer's."""
    return [token for text in texts for token in (1000 + encode(text[0]) if isinstance(text, list) else encode(text))]


def test_what_goes_on_is_one_sample(talk):
    talk.call("U:hi A:", "hello.")
    asked = talk.call("U:hi A:hello. U:so? A:", "yes.")
    assert asked.tolist() == tokens("U:hi A:", ["hello."], " U:so? A:")
    assert shown(talk) == [["U:hi A:", ["hello."], " U:so? A:", ["yes."]]]
    assert talk.branches[0].response_length == len("hello. U:so? A:yes.")


def test_a_short_answer_that_is_told_otherwise_is_given_up(talk):
    talk.call("U:hi A:", "ab!")
    asked = talk.call("U:hi A:ab. U:so? A:", "yes")
    assert asked.tolist() == tokens("U:hi A:", "ab. U:so? A:")
    assert shown(talk) == [["U:hi A:", "ab. U:so? A:", ["yes"]]]
    assert talk.num_realigned == 1


def test_a_long_answer_that_is_told_otherwise_is_forked(talk):
    talk.call("U:hi A:", "think, ab")
    asked = talk.call("U:hi A:ab U:so? A:", "yes")
    assert asked.tolist() == tokens("U:hi A:ab U:so? A:")
    assert shown(talk) == [["U:hi A:", ["think, ab"]], ["U:hi A:ab U:so? A:", ["yes"]]]
    # The shared beginning kept its tokens, and is the second one's prompt.
    assert talk.branches[1].response_length == 3


def test_a_tree_trains_each_turn_once(talk):
    talk.call("U:hi A:", "hello.")
    talk.call("U:hi A:hello. U:one A:", "1 it is")
    asked = talk.call("U:hi A:hello. U:two A:", "2 it is")
    # The turn that both share is context here, in the tokens that the model wrote.
    assert asked.tolist() == tokens("U:hi A:", ["hello."], " U:two A:")
    assert shown(talk) == [
        ["U:hi A:", ["hello."], " U:one A:", ["1 it is"]],
        ["U:hi A:hello. U:two A:", ["2 it is"]],
    ]
    # Each branch goes on by itself.
    talk.call("U:hi A:hello. U:one A:1 it is U:! A:", "a")
    talk.call("U:hi A:hello. U:two A:2 it is U:! A:", "b")
    assert [branch.num_answers for branch in talk.branches] == [3, 2]
    answers = [piece.text for branch in talk.branches for piece in branch.pieces[1:] if piece.completion]
    assert sorted(answers) == sorted(["hello.", "1 it is", "2 it is", "a", "b"])


def test_the_same_question_again_is_another_sample(talk):
    talk.call("U:hi A:", "x")
    asked = talk.call("U:hi A:", "y")
    assert asked.tolist() == tokens("U:hi A:")
    assert shown(talk) == [["U:hi A:", ["x"]], ["U:hi A:", ["y"]]]
    talk.call("U:hi A:y U:z A:", "w")
    assert shown(talk)[1] == ["U:hi A:", ["y"], " U:z A:", ["w"]]


def test_calls_at_once_do_not_mix(talk):
    first = talk.place("U:hi A:")
    second = talk.place("U:hi A:")
    assert first is not second
    talk.answer(second, "2", completion("2"))
    third = talk.place("U:hi A:2 U:b A:")
    assert third is second
    talk.answer(first, "1", completion("1"))
    talk.answer(third, "3", completion("3"))
    assert shown(talk) == [["U:hi A:", ["1"]], ["U:hi A:", ["2"], " U:b A:", ["3"]]]


def test_something_else_begins_anew(talk):
    talk.call("U:hi A:", "hello.")
    asked = talk.call("S:sum up A:", "s")
    assert decode(asked) == "S:sum up A:"
    assert len(talk.branches) == 2
