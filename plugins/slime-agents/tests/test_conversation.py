"""Branches of an agent's calls: clean, realigned, forked."""

import numpy as np
import pytest
from agents_speaker import decode, encode

from slime_agents.served.conversation import Conversation
from slime_core.types.completion import Completion, FinishReason


def completion(text):
    # Other tokens than the tokenizer would choose, so tokenizing again is detected.
    return Completion(
        request_id="r", token_ids=1000 + encode(text), log_probs=-np.ones(len(text), np.float32),
        finish_reason=FinishReason.STOP, spans=(),
    )  # fmt: skip


@pytest.fixture
def talk():
    made = Conversation(lambda text, most: encode(text), fork_threshold=5)

    def call(text, response):
        branch = made.place(text)
        asked = branch.token_ids
        made.add_response(branch, response, completion(response))
        return asked

    made.call = call
    return made


def shown(conversation):
    """Texts of every branch: the prompt, then [responses] and others' words."""
    return [
        [piece.text if piece.completion is None else [piece.text] for piece in branch.pieces]
        for branch in conversation.branches
    ]


def tokens(*texts):
    """`[response]` in the engine's own tokens, words in the tokenizer's."""
    return [token for text in texts for token in (1000 + encode(text[0]) if isinstance(text, list) else encode(text))]


def test_continued_calls_are_one_sample(talk):
    talk.call("U:hi A:", "hello.")
    asked = talk.call("U:hi A:hello. U:so? A:", "yes.")
    assert asked.tolist() == tokens("U:hi A:", ["hello."], " U:so? A:")
    assert shown(talk) == [["U:hi A:", ["hello."], " U:so? A:", ["yes."]]]
    assert talk.branches[0].response_length == len("hello. U:so? A:yes.")


def test_a_short_response_that_is_repeated_differently_is_replaced(talk):
    talk.call("U:hi A:", "ab!")
    asked = talk.call("U:hi A:ab. U:so? A:", "yes")
    assert asked.tolist() == tokens("U:hi A:", "ab. U:so? A:")
    assert shown(talk) == [["U:hi A:", "ab. U:so? A:", ["yes"]]]
    assert talk.num_realigned == 1


def test_a_long_response_that_is_repeated_differently_is_forked(talk):
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
    # Each branch continues by itself.
    talk.call("U:hi A:hello. U:one A:1 it is U:! A:", "a")
    talk.call("U:hi A:hello. U:two A:2 it is U:! A:", "b")
    assert [branch.num_responses for branch in talk.branches] == [3, 2]
    responses = [piece.text for branch in talk.branches for piece in branch.pieces[1:] if piece.completion]
    assert sorted(responses) == sorted(["hello.", "1 it is", "2 it is", "a", "b"])


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
    talk.add_response(second, "2", completion("2"))
    third = talk.place("U:hi A:2 U:b A:")
    assert third is second
    talk.add_response(first, "1", completion("1"))
    talk.add_response(third, "3", completion("3"))
    assert shown(talk) == [["U:hi A:", ["1"]], ["U:hi A:", ["2"], " U:b A:", ["3"]]]


def test_another_text_is_a_new_branch(talk):
    talk.call("U:hi A:", "hello.")
    asked = talk.call("S:sum up A:", "s")
    assert decode(asked) == "S:sum up A:"
    assert len(talk.branches) == 2
