"""Which tokens are trained, compared with renderings written by hand: ^ marks trained characters."""

from __future__ import annotations

import pytest

from slime_core.errors import DataError
from slime_distill.assistant_turns import AssistantTurns
from slime_distill.conversations import tokenized

SYSTEM = {"role": "system", "content": "be kind"}
ASK = {"role": "user", "content": "1+1"}
CALL = {"role": "assistant", "content": "add 1 1"}
TOOL = {"role": "tool", "content": "2"}
REPLY = {"role": "assistant", "content": "it is 2"}
THANKS = {"role": "user", "content": "ok"}
EMPTY = {"role": "assistant", "content": ""}
BOTH = ("plain", "marked")


def shown(tokenizer, messages, **options):
    """The text, and for each character whether it is trained. Tokens are characters here."""
    turns = AssistantTurns(tokenizer, {}, **options)
    rendered = turns.render(messages, None, "train.jsonl:7")
    token_ids, mask = tokenized(rendered, tokenizer)
    assert len(token_ids) == len(mask) == len(rendered.text)
    return rendered.text, "".join("^" if bit else " " for bit in mask).rstrip()


@pytest.mark.parametrize("template", BOTH)
def test_tools_and_users_are_not_learnt(tokenizer, template):
    text, learnt = shown(tokenizer(template), [SYSTEM, ASK, CALL, TOOL, REPLY, THANKS])
    assert text == "<system>be kind;<user>1+1;<assistant>add 1 1;<tool>2;<assistant>it is 2;<user>ok;"
    assert learnt == "                                     ^^^^^^^^                   ^^^^^^^^"


@pytest.mark.parametrize("template", BOTH)
def test_an_empty_response_is_its_end(tokenizer, template):
    text, learnt = shown(tokenizer(template), [ASK, EMPTY, THANKS, REPLY])
    assert text == "<user>1+1;<assistant>;<user>ok;<assistant>it is 2;"
    assert learnt == "                     ^                    ^^^^^^^^"


@pytest.mark.parametrize("template", BOTH)
def test_a_turn_can_be_left_out(tokenizer, template):
    text, learnt = shown(tokenizer(template), [ASK, CALL | {"step_loss_mask": 0}, TOOL, REPLY])
    assert text == "<user>1+1;<assistant>add 1 1;<tool>2;<assistant>it is 2;"
    assert learnt == "                                                ^^^^^^^^"
    _, learnt = shown(tokenizer(template), [ASK, REPLY | {"step_loss_mask": 0}])
    assert learnt == ""


@pytest.mark.parametrize("template", [*BOTH, "looks_back"])
def test_the_last_turn_alone(tokenizer, template):
    text, learnt = shown(tokenizer(template), [ASK, CALL, THANKS, REPLY], last_turn_only=True)
    if template == "looks_back":
        assert text == "<user>1+1;<assistant>add 1 1;<user>ok;<assistant>!it is 2;"
        # What the generation prompt ends with is not the turn, a mark that only the last message gets is.
        assert learnt == "                                                 ^^^^^^^^^"
    else:
        assert text == "<user>1+1;<assistant>add 1 1;<user>ok;<assistant>it is 2;"
        assert learnt == "                                                 ^^^^^^^^"


@pytest.mark.parametrize("template", BOTH)
def test_a_token_that_is_partly_in_a_turn_is_learnt(tokenizer, template):
    """`t>it` spans the header and the response, `;<` the end of the response and the next header."""
    made = tokenizer(template, tokens=("t>it", ";<"))
    turns = AssistantTurns(made, {})
    token_ids, mask = tokenized(turns.render([ASK, REPLY, THANKS], None, ""), made)
    pieces = made.convert_ids_to_tokens(token_ids)
    assert [piece for piece, bit in zip(pieces, mask, strict=True) if bit] == ["t>it", *" is 2", ";<"]


def test_a_template_that_changes_what_it_wrote_before_is_an_error(tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:7: .* up to message 1.*generation.*last_assistant"):
        shown(tokenizer("looks_back"), [ASK, CALL, THANKS, REPLY])


def test_marks_that_cannot_be_matched_with_turns_are_an_error(tokenizer):
    made = tokenizer("marked")
    made.chat_template = "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    text, learnt = shown(made, [ASK, CALL, THANKS, REPLY])
    assert (text, learnt) == ("it is 2", "^^^^^^^")
    with pytest.raises(DataError, match=r"train.jsonl:7: the chat template marks 1 turns .* 2 messages"):
        shown(made, [ASK, CALL, THANKS, REPLY], last_turn_only=True)


def test_nothing_marked_at_all_is_an_error(tokenizer):
    made = tokenizer("marked")
    made.chat_template = "{{ messages[0].content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(DataError, match="marks 0 turns"):
        shown(made, [ASK, REPLY])


@pytest.mark.parametrize("template", ["plain", "fails"])
def test_rows_without_a_response_and_templates_that_fail_name_the_row(tokenizer, template):
    with pytest.raises(DataError, match=r'train.jsonl:7: no message with role "assistant".* there is system, user'):
        shown(tokenizer(template), [SYSTEM, ASK])
    if template == "fails":
        with pytest.raises(DataError, match=r"train.jsonl:7: the chat template failed: only two roles"):
            shown(tokenizer(template), [ASK, REPLY])


def test_arguments_of_the_template_and_tools_reach_it(tokenizer):
    for template in BOTH:
        made = tokenizer(template)
        made.chat_template = "{{ tools[0].name }}{{ shout }}" + made.chat_template
        rendered = AssistantTurns(made, {"shout": "!"}).render([ASK, REPLY], [{"name": "add"}], "")
        assert rendered.text == "add!<user>1+1;<assistant>it is 2;"
        assert [rendered.text[start:end] for start, end in rendered.turns] == ["it is 2;"]
