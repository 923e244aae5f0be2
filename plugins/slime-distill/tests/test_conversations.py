"""Rows of the data as groups of one finished sample."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import numpy as np
import PIL.Image
import pytest

from slime_core.config.rollout import RolloutConfig
from slime_core.config.run import DataConfig
from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.errors import DataError, RolloutError
from slime_core.rollout.context import RolloutContext
from slime_core.types.image import Image
from slime_core.types.sample import Status
from slime_models.media.renderer import QwenVlRenderer
from slime_models.new_model import character_tokenizer
from slime_sources.config import FilesConfig
from slime_sources.files import FilesSource
from slime_sources.rendering.prompt_renderer import PromptRenderer

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]


@pytest.fixture
def collected(part, tmp_path):
    """The samples of one step over these rows, and what the observer heard."""

    def collect(tokenizer, rows, *, data=None, options=None, num_rows=None, images=None, videos=None, **limits):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = DataConfig(**(data or {}))
        media = None
        if images is not None:
            video_key = None if videos is None else "clips"
            media = QwenVlRenderer(tokenizer, images, image_key="images", video_key=video_key, videos=videos)
        renderer = PromptRenderer(
            tokenizer,
            input_key="input",
            label_key=settings.label_key,
            apply_chat_template=settings.apply_chat_template,
            media=media,
        )
        source = FilesSource(FilesConfig(prompt_data=str(path)), renderer, seed=0)
        buffer = DataBuffer(source, PopFirstFilter())
        heard = []
        context = RolloutContext(
            config=RolloutConfig(
                rollout_batch_size=num_rows or len(rows), **{"rollout_max_response_len": 99, **limits}
            ),
            data=settings,
            tokenizer=tokenizer,
            buffer=buffer,
            runner=None,
            filters=(),
            observe=lambda *event: heard.append(event),
        )
        groups = asyncio.run(part("slime.collectors", "sft", **(options or {})).collect(0, context))
        assert heard == [(0, groups, [])]
        assert [len(group.samples) for group in groups] == [1] * len(groups)
        return [group.samples[0] for group in groups]

    return collect


def pieces(tokenizer, token_ids):
    return "".join(tokenizer.convert_ids_to_tokens(token_ids))


def test_a_label_that_the_tokenizer_cannot_express(collected):
    with pytest.raises(
        DataError, match=r"train.jsonl, line 1: the tokenizer cannot express 50\.00% of the text, such as '²'"
    ):
        collected(character_tokenizer("ab"), [{"input": "a", "label": "b²"}], data={"label_key": "label"})


def test_prompts_with_labels(collected, tokenizer):
    made = tokenizer()
    end = made.eos_token
    rows = [{"input": "1+1=", "label": "2"}, {"input": "a", "label": ""}, {"input": "2+2+2=", "label": "is 6"}]
    samples = collected(made, rows, data={"label_key": "label"})
    texts = [(pieces(made, s.tokens[: s.prompt_length]), pieces(made, s.response_tokens)) for s in samples]
    assert texts == [("1+1=", f"2{end}"), ("a", end), ("2+2+2=", f"is 6{end}")]
    assert all(sample.loss_mask.all() for sample in samples)
    for number, sample in enumerate(samples):
        assert (sample.index, sample.group_index, sample.rollout_id) == (number, number, number)
        assert sample.reward is None
        assert sample.status is Status.COMPLETED
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert not sample.rollout_log_probs.any()
        assert sample.spans == ()


@pytest.mark.parametrize("template", ["plain", "marked"])
def test_conversations(collected, tokenizer, template):
    made = tokenizer(template)
    rows = [
        {"input": TALK},
        {"input": TALK, "label": "no"},
        {"input": "hi", "label": "yes"},
        {"input": [*TALK, {"role": "assistant", "content": "no"}], "label": "not this one"},
    ]
    first, *others = collected(
        made, [row | {"label": row.get("label")} for row in rows],
        data={"apply_chat_template": True, "label_key": "label"},
    )  # fmt: skip
    # The response begins with the first learnt token and continues to the end of the conversation.
    assert pieces(made, first.tokens[: first.prompt_length]) == "<user>hi;<assistant>" == first.prompt.text
    assert np.array_equal(first.prompt.token_ids, first.tokens[: first.prompt_length])
    assert pieces(made, first.response_tokens) == "yes;<user>so;"
    assert first.loss_mask.tolist() == [1, 1, 1, 1, *[0] * 9]
    learnt = [pieces(made, sample.response_tokens[sample.loss_mask == 1]) for sample in others]
    assert learnt == ["yes;no;", "yes;", "yes;no;"]


def test_the_last_turn_alone(collected, tokenizer):
    made = tokenizer("looks_back")
    (sample,) = collected(
        made, [{"input": [*TALK, {"role": "assistant", "content": "no"}]}], data={"apply_chat_template": True},
        options={"loss_mask_type": "last_assistant"},
    )  # fmt: skip
    assert sample.prompt.text == "<user>hi;<assistant>yes;<user>so;<assistant>"
    assert pieces(made, sample.response_tokens) == "!no;"


class Squares:
    """As `slime_models.media.image_processor` is: a feature for each 2 x 2 pixels. No test reads the pixels."""

    token_id, video_token_id = 2, -1

    def num_tokens(self, image):
        width, height = PIL.Image.open(io.BytesIO(image.data)).size
        return width * height // 4


def picture(width, height):
    file = io.BytesIO()
    PIL.Image.new("L", (width, height)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_images_are_seen_wherever_they_are_and_never_learnt(collected, tokenizer):
    made = tokenizer(tokens=["$"])
    made.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '$' if p.type == 'image' else p.text }}{% endfor %}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [
        {"role": "user", "content": "a<image>?"}, {"role": "assistant", "content": "b<image>c"},
        {"role": "user", "content": "<image>so"}, {"role": "assistant", "content": "no"},
    ]  # fmt: skip
    row = {"input": talk, "images": [picture(4, 2), picture(2, 2), picture(6, 2)]}
    options = {"data": {"apply_chat_template": True}, "images": Squares()}
    (sample,) = collected(made, [row], **options)
    assert pieces(made, sample.tokens) == "<user>a$$?;<assistant>b$c;<user>$$$so;<assistant>no;"
    assert pieces(made, sample.prompt.token_ids) == "<user>a$$?;<assistant>"
    assert pieces(made, sample.response_tokens[sample.loss_mask == 1]) == "bc;no;"
    assert [sample.tokens[image.places[0] :][: image.num_tokens].tolist() for image in sample.prompt.images] == [
        [2, 2], [2], [2, 2, 2]
    ]  # fmt: skip
    # Cut in the middle of the last image, it is cut before it.
    whole, until = len(sample.tokens), sample.prompt.images[2].places[0]
    for limit, length, seen in ((whole - 1, whole - 1, 3), (until + 2, until, 2), (until, until, 2), (8, 7, 0)):
        (cut,) = collected(made, [row], **options, rollout_max_context_len=limit)
        assert (len(cut.tokens), len(cut.prompt.images)) == (length, seen)
        assert cut.status is Status.TRUNCATED
    with pytest.raises(DataError, match="1 images and videos with 1 places, and 2 of their tokens in the conversation"):
        collected(
            made, [{"input": talk[:1], "images": row["images"][:1], "label": "$"}],
            data={"apply_chat_template": True, "label_key": "label"}, images=Squares(),
        )  # fmt: skip


class Halves:
    """As `slime_models.media.video_reader` is: four frames, the middle two at one second. No test reads the pixels."""

    def read_file(self, data, name):
        return Image(data=data, name=name, frames=4, seconds=(0.25, 1.25))


def test_videos_are_seen_with_their_times(collected, tokenizer):
    mark = "<|vision_start|><|video_pad|><|vision_end|>"
    made = tokenizer(tokens=["<|vision_start|>", "<|video_pad|>", "<|vision_end|>", "."])
    made.chat_template = (
        "{% for m in messages %}{{ m.role }};{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '" + mark + "' if p.type == 'video' else p.text }}{% endfor %}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}assistant;{% endif %}"
    )

    class Clips(Squares):
        token_id, video_token_id = -1, made.convert_tokens_to_ids("<|video_pad|>")

        def num_tokens(self, image):
            return 6

    talk = [
        {"role": "user", "content": "a<video>"}, {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "<video>d"}, {"role": "assistant", "content": "no"},
    ]  # fmt: skip
    (sample,) = collected(
        made, [{"input": talk, "clips": [picture(2, 2), picture(4, 2)]}], data={"apply_chat_template": True},
        images=Clips(), videos=Halves(),
    )  # fmt: skip
    whole = "<|video_pad|>" * 3
    shown = f"<0.2 seconds>{mark.replace('<|video_pad|>', whole)}<1.2 seconds>{mark.replace('<|video_pad|>', whole)}"
    assert pieces(made, sample.tokens) == f"user;a{shown};assistant;bc;user;{shown}d;assistant;no;"
    assert pieces(made, sample.response_tokens[sample.loss_mask == 1]) == "bc;no;"
    for video in sample.prompt.images:
        assert [pieces(made, sample.tokens[place : place + 3]) for place in video.places] == [whole, whole]


def test_nothing_learnt_is_an_empty_response(collected, tokenizer):
    silent = [TALK[0], TALK[1] | {"step_loss_mask": 0}]
    (sample,) = collected(tokenizer(), [{"input": silent}], data={"apply_chat_template": True})
    assert (sample.response_length, len(sample.loss_mask), sample.num_trainable) == (0, 0, 0)
    assert sample.prompt_length == len("<user>hi;<assistant>yes;")


def test_the_first_token_is_never_learnt(collected, tokenizer):
    made = tokenizer("marked")
    made.chat_template = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    (sample,) = collected(made, [{"input": TALK}], data={"apply_chat_template": True})
    assert (sample.prompt_length, pieces(made, sample.response_tokens)) == (1, "es")


@pytest.mark.parametrize(
    ("limits", "length", "response"),
    [
        ({"rollout_max_response_len": 5}, 9, 5),
        ({"rollout_max_context_len": 7}, 7, 3),
        ({"rollout_max_context_len": 3}, 3, 0),
        ({"rollout_max_response_len": 6}, 10, 6),
    ],
)
def test_long_responses_are_cut_and_counted(collected, tokenizer, limits, length, response):
    (sample,) = collected(tokenizer(), [{"input": "1+1=", "label": "equal"}], data={"label_key": "label"}, **limits)
    assert (len(sample.tokens), sample.response_length, len(sample.loss_mask)) == (length, response, response)
    assert sample.prompt_length >= 1
    assert sample.status is (Status.COMPLETED if response == 6 else Status.TRUNCATED)


@pytest.mark.parametrize(
    ("row", "data", "error"),
    [
        ({"input": "1+1="}, {}, r"train.jsonl.*1.*a prompt without a response.*--label-key"),
        ({"input": "1+1=", "label": 2}, {"label_key": "label"}, r"train.jsonl.*1.*must be a string, found 2"),
        ({"input": TALK[:1]}, {"apply_chat_template": True}, r'train.jsonl.*1.*no message with role "assistant"'),
        ({"messages": TALK}, {"apply_chat_template": True}, r'train.jsonl.*1.*no key "input".*messages'),
    ],
)
def test_rows_that_cannot_be_trained_are_named(collected, tokenizer, row, data, error):
    with pytest.raises(DataError, match=error):
        collected(tokenizer(), [row], data=data)


def test_the_end_of_the_data(collected, tokenizer, monkeypatch):
    take = FilesSource.take
    monkeypatch.setattr(FilesSource, "take", lambda self, num_prompts: take(self, min(num_prompts, 1)))
    with pytest.raises(RolloutError, match="step 0: the data has ended: 1 rows are left, and 2 are required"):
        collected(tokenizer(), [{"input": "a", "label": "b"}], data={"label_key": "label"}, num_rows=2)
