from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_core.contracts.media import MediaRenderer
from slime_core.errors import ConfigError, DataError, ModelError
from slime_core.types.image import Image
from slime_plugin_kit.groups import byte_tokenizer
from slime_sources.rendering.prompt_renderer import PromptRenderer

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
        label_key="reply",
        metadata_key="extra",
        tool_key="functions",
        apply_chat_template=True,
        apply_chat_template_kwargs={"shout": True},
    )
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for tools in (TOOLS, json.dumps(TOOLS)):
        prompt = render(renderer, chat=chat, reply={"x": [1]}, extra={"a": 1}, functions=tools)
        assert prompt.text == "[search,run]<system>be brief<user>hi<assistant>!"
        assert prompt.messages == chat
        assert prompt.label == {"x": [1]}
        assert prompt.tools == TOOLS
        assert prompt.metadata == {"a": 1, "tools": TOOLS}
    for nothing in (None, "", []):
        prompt = render(renderer, chat=chat, reply=0, functions=nothing)
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
        ({"input": [{"role": "user", "content": ""}], "label": 0}, "pass --apply-chat-template"),
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
        ([{"role": "villain", "content": "a"}], "the chat template of the model failed: no villains"),
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
    with pytest.raises(ModelError, match=r"has no chat template. Add chat_template.jinja .* or omit --apply-chat"):
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


def test_a_prompt_leaves_the_model_a_token_for_the_response(tokenizer):
    renderer = PromptRenderer(tokenizer, context_len=4)
    assert renderer.accepts(render(renderer, input="123"))
    assert renderer.notices() == []
    assert not renderer.accepts(render(renderer, input="1234"))
    (notice,) = renderer.notices()
    assert notice == (
        "1 row (train.jsonl, line 3: 4 tokens): left out, because the model reads 4 tokens, one of which is left for the "
        "response (rollout/data/num_too_long)"
    )
    # A limit that the run sets below that is not warned about, and one above it does not count.
    for limit, is_named in ((2, False), (3, False), (4, True), (100, True)):
        renderer = PromptRenderer(tokenizer, max_prompt_len=limit, context_len=4)
        assert not renderer.accepts(render(renderer, input="1234"))
        assert bool(renderer.notices()) == is_named
        assert renderer.limit.startswith(
            "the model reads 4 tokens" if is_named else f"rollout_max_prompt_len is {limit}"
        )


@pytest.mark.parametrize("is_chat", [False, True])
def test_only_the_beginning_of_a_text_that_is_too_long_is_tokenized(tokenizer, monkeypatch, is_chat):
    lengths = []
    encode = PreTrainedTokenizerFast.encode
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "encode",
        lambda self, text, **options: lengths.append(len(text)) or encode(self, text, **options),
    )
    renderer = PromptRenderer(tokenizer, context_len=10_000, apply_chat_template=is_chat)
    assert not renderer.accepts(render(renderer, input="1" * 3_000_000))
    assert max(lengths) < 100_000
    assert "79,992 tokens or more" in renderer.notices()[0]
    # Without a limit, everything is a prompt.
    assert len(render(PromptRenderer(tokenizer), input="1" * 100_001).token_ids) == 100_001


def test_a_long_text_of_few_tokens_is_a_prompt():
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    renderer = PromptRenderer(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?"), context_len=4)
    prompt = render(renderer, input=f"a{' ' * 300_000}b")
    assert prompt.token_ids.tolist() == [0, 1]
    assert renderer.accepts(prompt)


def of_characters(alphabet: str, **options: str) -> PreTrainedTokenizerFast:
    """BPE without merges drops what is not in its alphabet, if it has no unknown token."""
    vocabulary = {piece: number for number, piece in enumerate([*options.values(), *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, [], **options))
    core.normalizer = normalizers.Lowercase()
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("options", [{}, {"unk_token": "<pad>"}])
def test_text_that_the_tokenizer_cannot_express_is_a_bad_row(options):
    renderer = PromptRenderer(of_characters("0123456789+= ab", **options))
    assert render(renderer, input="A 1+1=").token_ids.tolist() == renderer.tokenizer.encode("a 1+1=")
    with pytest.raises(DataError) as caught:
        render(renderer, input="1+1=²日日日")
    assert str(caught.value) == (
        "train.jsonl, line 3: the tokenizer cannot express 50.00% of the text, such as '²', '日'; the model would not see "
        "it. Use a model that has these characters, or accept it: --max-unknown-share 0.5"
    )
    tolerant = PromptRenderer(renderer.tokenizer, max_unknown_share=0.5)
    for _ in range(2):
        assert render(tolerant, input="1+1=²日日日").text == "1+1=²日日日"
    assert tolerant.notices() == [
        "1 row (train.jsonl, line 3: the tokenizer cannot express 50.00% of the text, such as '²', '日'): the model does not "
        "see this text (max_unknown_share)"
    ]


def test_a_text_may_name_the_unknown_token(tokenizer):
    renderer = PromptRenderer(tokenizer)
    assert render(renderer, input="why?").token_ids.tolist() == ids("why?")
    with pytest.raises(DataError, match=r"cannot express 25\.00% of the text, such as '日'"):
        render(renderer, input="1日a?")


def test_a_tokenizer_of_bytes_expresses_every_text():
    renderer = PromptRenderer(byte_tokenizer())
    text = "1²日\U00012000\x00\u0301"
    assert render(renderer, input=text).token_ids.size == len(text.encode())


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[9].content.x }}", "list object has no element 9"),
        ("{{ {}['a']['b'] }}", "'dict object' has no attribute 'a'"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 'a' * 10**18 }}", "MemoryError"),
        ("{{ 'x'.index('y') }}", "ValueError: substring not found"),
        ("{% for i in range(10**12) %}1{% endfor %}", "its loops over range\\(\\) count more than 100,000 numbers"),
        ("{% for i in range(10**99) %}1{% endfor %}", "OverflowError"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "count more than 100,000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ", "unexpected"),
    ],
)
def test_a_template_that_fails_is_a_bad_row(tokenizer, template, problem):
    failing = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template)
    with pytest.raises(DataError, match=f"^train.jsonl, line 3: the chat template of the model failed: .*{problem}"):
        render(PromptRenderer(failing, apply_chat_template=True), input="1")


def test_a_template_may_count(tokenizer):
    template = "{% for i in range(2, 5) %}{{ i }}{% endfor %}{% for i in range(messages | length) %}m{% endfor %}"
    counting = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template)
    assert render(PromptRenderer(counting, apply_chat_template=True), input="1").text == "234m"


class Marks(MediaRenderer):
    """Each letter of the column "pics" is a picture: `#` in the text, and three tokens."""

    def __init__(self):
        self.folders = []

    def read(self, row, origin, folder):
        self.folders.append(folder)
        return tuple(Image(data=letter.encode(), name=origin) for letter in row.get("pics", ""))

    def place(self, messages, images, origin):
        return [message | {"content": message["content"] + "@" * len(images)} for message in messages]

    def mark(self, text, images, origin):
        return text.replace("@", "#")

    def expand(self, token_ids, images, origin):
        is_place = token_ids == ord("#")
        places = iter((np.flatnonzero(is_place) + 2 * np.arange(is_place.sum())).tolist())
        placed = tuple(replace(image, places=(next(places),), num_tokens=3) for image in images)
        return np.repeat(token_ids, np.where(is_place, 3, 1)), placed


def test_media_are_put_into_messages_text_and_tokens(tokenizer, tmp_path):
    media = Marks()
    renderer = PromptRenderer(tokenizer, media=media, apply_chat_template=True)
    row = {"input": "hi", "pics": "xy"}
    prompt = renderer.render(row, group_index=0, origin="train.jsonl, line 3", folder=tmp_path)
    assert media.folders == [tmp_path]
    assert prompt.messages == [{"role": "user", "content": "hi@@"}]
    assert prompt.text == "<user>hi##<assistant>"
    assert prompt.token_ids.tolist() == ids("<user>hi######<assistant>")
    assert [(image.data, image.name, image.places) for image in prompt.images] == [
        (b"x", "train.jsonl, line 3", (8,)), (b"y", "train.jsonl, line 3", (11,)),
    ]  # fmt: skip
    # Without the template a whole prompt has its marks already.
    whole = render(PromptRenderer(tokenizer, media=media), input="a@b", pics="x")
    assert (whole.messages, whole.text, whole.token_ids.tolist()) == (None, "a#b", ids("a###b"))


TEXT_ALONE = """
import sys
from pathlib import Path

sys.modules |= dict.fromkeys(["slime_models", "PIL", "av"])
import slime_core.controller.run_inputs
import slime_core.workers.train_worker
from slime_core.data.model_folder import load_tokenizer
from slime_sources.rendering.prompt_renderer import PromptRenderer

renderer = PromptRenderer(load_tokenizer(Path(sys.argv[1]), trust_remote_code=False), apply_chat_template=True)
print(renderer.render({"input": "1+1"}, group_index=0, origin="").token_ids.tolist())
assert not [name for name in sys.modules if name.startswith("slime_models.")]
"""


def test_text_needs_nothing_that_makes_images(tokenizer, tmp_path):
    """Their imports fail there, as where they are not installed."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", TEXT_ALONE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ids("<user>1+1<assistant>")
