from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from slime_core.data.render import PromptRenderer
from slime_core.errors import ConfigError, DataError, ModelError

TOOLS = [{"name": "search"}, {"name": "run"}]


def render(renderer: PromptRenderer, **row: object):
    return renderer.render(row, group_index=7, origin="train.jsonl, line 3")


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_a_string_is_the_prompt_when_the_template_is_off(tokenizer):
    assert tokenizer("a").input_ids == ids("^a")
    prompt = render(PromptRenderer(tokenizer), input="<user>1+1", label="2", other=0)
    assert prompt.text == "<user>1+1"
    assert prompt.token_ids.tolist() == ids("<user>1+1")
    assert prompt.token_ids.dtype == np.int32
    assert (prompt.group_index, prompt.origin) == (7, "train.jsonl, line 3")
    assert (prompt.label, prompt.messages, prompt.tools, prompt.metadata) == (None, None, None, {})


def test_a_string_is_one_user_message_when_it_is_on(tokenizer):
    prompt = render(PromptRenderer(tokenizer, apply_chat_template=True), input="1+1")
    assert prompt.text == "<user>1+1<assistant>"
    assert prompt.token_ids.tolist() == ids("<user>1+1<assistant>")
    assert prompt.messages == [{"role": "user", "content": "1+1"}]


def test_messages_tools_and_template_arguments(tokenizer):
    renderer = PromptRenderer(
        tokenizer,
        input_key="chat",
        label_key="answer",
        metadata_key="extra",
        tool_key="functions",
        apply_chat_template=True,
        apply_chat_template_kwargs={"shout": True},
    )
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for tools in (TOOLS, json.dumps(TOOLS)):
        prompt = render(renderer, chat=chat, answer={"x": [1]}, extra={"a": 1}, functions=tools)
        assert prompt.text == "[search,run]<system>be brief<user>hi<assistant>!"
        assert prompt.messages == chat
        assert prompt.label == {"x": [1]}
        assert prompt.tools == TOOLS
        assert prompt.metadata == {"a": 1, "tools": TOOLS}
    for nothing in (None, "", []):
        prompt = render(renderer, chat=chat, answer=0, functions=nothing)
        assert prompt.text == "<system>be brief<user>hi<assistant>!"
        assert (prompt.tools, prompt.metadata) == (None, {})


def test_the_row_is_not_changed(tokenizer):
    row = {"input": "hi", "metadata": {"a": 1}, "tools": TOOLS}
    PromptRenderer(tokenizer).render(row, group_index=0, origin="")
    assert row == {"input": "hi", "metadata": {"a": 1}, "tools": TOOLS}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "label": "x"}, r'no key "input" \(input_key\); the row has: prompt, label'),
        ({"input": "hi"}, r'no key "label" \(label_key\); the row has: input'),
        ({"input": 3, "label": 0}, r'"input" \(input_key\) must be a string or a list of messages, found 3'),
        ({"input": None, "label": 0}, "must be a string or a list of messages, found None"),
        ({"input": [{"role": "user", "content": ""}], "label": 0}, "type --apply-chat-template"),
        ({"input": "", "label": 0}, "the prompt has no tokens: ''"),
        ({"input": "a\ud800", "label": 0}, "not valid Unicode"),
        ({"input": "a", "label": 0, "metadata": "{}"}, r'"metadata" \(metadata_key\) must be an object'),
        ({"input": "a", "label": 0, "metadata": {"b": {1}}}, r"metadata\['b'\] is of type set"),
        ({"input": "a", "label": float("nan")}, "the label is nan, which JSON cannot hold"),
        ({"input": "a", "label": 0, "tools": "[{"}, r'"tools" \(tool_key\) is not valid JSON'),
        ({"input": "a", "label": 0, "tools": {"name": "f"}}, r'"tools" \(tool_key\) must be a list of objects'),
        ({"input": "a", "label": 0, "tools": ["f"]}, r'"tools" \(tool_key\) must be a list of objects'),
    ],
)
def test_a_bad_row_is_named(tokenizer, row, message: str):
    with pytest.raises(DataError, match=message) as caught:
        PromptRenderer(tokenizer, label_key="label").render(row, group_index=0, origin="train.jsonl, line 3")
    assert str(caught.value).startswith("train.jsonl, line 3: ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "must be a string or a list of messages, found"),
        ({"role": "user"}, "must be a string or a list of messages"),
        ([{"role": "user", "content": "a"}, "b"], 'message 1 of "input" is not an object with a role'),
        ([{"content": "a"}], 'message 0 of "input" is not an object with a role'),
        ([{"role": "villain", "content": "a"}], "the chat template failed: no villains"),
        ([{"role": "user", "content": {"a", "b"}}], r"\[0\]\['content'\] is of type set"),
    ],
)
def test_bad_messages_are_named(tokenizer, value, message: str):
    with pytest.raises(DataError, match=message) as caught:
        render(PromptRenderer(tokenizer, apply_chat_template=True), input=value)
    assert str(caught.value).startswith("train.jsonl, line 3: ")


def test_a_tokenizer_without_a_template(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    assert PromptRenderer(bare) is not None
    with pytest.raises(ModelError, match=r"has no chat template: add chat_template.jinja .* or leave out --apply-chat"):
        PromptRenderer(bare, apply_chat_template=True)


def test_template_arguments_that_slime_decides(tokenizer):
    with pytest.raises(ConfigError, match="add_generation_prompt, tokenize cannot be set"):
        PromptRenderer(tokenizer, apply_chat_template_kwargs={"tokenize": True, "add_generation_prompt": False})


def test_the_maximum_length_counts_the_rendered_tokens(tokenizer):
    renderer = PromptRenderer(tokenizer, apply_chat_template=True, max_prompt_len=len("<user>12<assistant>"))
    assert renderer.accepts(render(renderer, input="12"))
    assert not renderer.accepts(render(renderer, input="123"))
    assert not renderer.accepts(render(renderer, input=[{"role": "user", "content": "123"}]))
    assert PromptRenderer(tokenizer).accepts(render(renderer, input="1" * 1000))
