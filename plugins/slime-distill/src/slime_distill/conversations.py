"""ConversationGroups: the collector of supervised fine-tuning. A row of the data is a group of one finished sample.

Legend: T tokens, P of them before the first trained one, R = T - P.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.contracts.collector import Collector
from slime_core.errors import DataError, ModelError, RolloutError
from slime_core.types.image import Image
from slime_core.types.prompt import Message, Prompt
from slime_core.types.sample import Sample, SampleGroup, Status
from slime_core.types.trajectory import clean_text, decode
from slime_distill.assistant_turns import ASSISTANT, AssistantTurns, Rendered
from slime_models.media.token_places import VIDEO_MARK, timed_mark, with_features, with_times
from slime_sources.rendering.unknown_text import UnknownText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_core.config.rollout import RolloutConfig
    from slime_core.rollout.context import RolloutContext

Tokens: TypeAlias = npt.NDArray[np.int32]
Mask: TypeAlias = npt.NDArray[np.uint8]


class ConversationGroups(Collector["RolloutContext"]):
    """Takes rows from the buffer in its order. With messages (`data.apply_chat_template`) the assistant's turns are trained;
    the label is the last turn if the messages do not end with one. Without, the label and an end token are trained.

    Text longer than `rollout_max_response_len` or `rollout_max_context_len` is cut, and counted as truncated.
    """

    def __init__(self, *, last_turn_only: bool = False) -> None:
        self._last_turn_only = last_turn_only

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        """RolloutError if the data has ended; DataError, with its origin, for a row without a response."""
        num_groups = context.config.rollout_batch_size
        items = context.take(num_groups)
        if len(items) < num_groups:
            context.buffer.add_samples([item.as_returned(step) for item in items])
            raise RolloutError(
                f"step {step}: the data has ended: {len(items)} rows are left, and {num_groups} are required."
            )
        turns = AssistantTurns(
            context.tokenizer, context.data.apply_chat_template_kwargs, last_turn_only=self._last_turn_only
        )
        unknown = UnknownText(context.tokenizer)
        refuse = functools.partial(unknown.refuse, max_share=context.data.max_unknown_share)
        groups = [group_of(item.prompt, context.tokenizer, turns, context.config, refuse) for item in items]
        context.observe(step, groups, [])
        return groups


def group_of(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    turns: AssistantTurns,
    limits: RolloutConfig,
    refuse: Callable[[str, Tokens, str], object],
) -> SampleGroup:
    """Makes a group of one sample from a row. `refuse` raises for text, its tokens and its origin, if too much is unknown."""
    images = prompt.images
    if prompt.messages is None:
        token_ids, mask = labelled(prompt, tokenizer)
        # The renderer has checked the prompt; the last token is the end token.
        refuse(text_label(prompt), token_ids[len(prompt.token_ids) : -1], prompt.origin)
    else:
        rendered = with_videos(turns.render(conversation(prompt), prompt.tools, prompt.origin), prompt)
        token_ids, mask = tokenized(rendered, tokenizer)
        refuse(rendered.text, token_ids, prompt.origin)
        if images:
            token_ids, mask, images = with_images(prompt, token_ids, mask)
    # The first token cannot be predicted: no token is before it.
    learnt = np.flatnonzero(mask[1:]) + 1
    start = int(learnt[0]) if len(learnt) else len(token_ids)
    length = min(len(token_ids), start + limits.rollout_max_response_len, limits.rollout_max_context_len or 2**62)
    # An image is kept as a whole, or cut as a whole.
    cut = [image for image in images if image.places and last_of(image) >= length]
    length = min([length, *(image.places[0] for image in cut)])
    start = min(start, length)
    seen = tuple(image for image in images if image not in cut)
    if prompt.messages is not None:
        # The prompt is the conversation up to the first trained token, without a generation prompt after it.
        prompt = replace(prompt, token_ids=token_ids[:start], text=tokenizer.decode(token_ids[:start]), images=seen)
    elif cut:
        prompt = replace(prompt, images=seen)
    sample = Sample(
        index=prompt.group_index,
        group_index=prompt.group_index,
        rollout_id=prompt.group_index,
        prompt=prompt,
        tokens=token_ids[:length],
        prompt_length=start,
        loss_mask=mask[start:length],
        rollout_log_probs=np.zeros(length - start, np.float32),
        response=clean_text(tokenizer, token_ids[start:length], mask[start:length]),
        raw_response=decode(tokenizer, token_ids[start:length]),
        status=Status.COMPLETED if length == len(token_ids) else Status.TRUNCATED,
    )
    return SampleGroup(prompt=prompt, samples=(sample,))


def last_of(image: Image) -> int:
    """Position of its last feature."""
    return image.places[-1] + image.num_tokens // image.num_places - 1


def with_videos(rendered: Rendered, prompt: Prompt) -> Rendered:
    """Inserts the times of each video's frames into the text, and moves the turns accordingly."""
    videos = [image for image in prompt.images if image.frames]
    if not videos:
        return rendered
    text = with_times(rendered.text, videos, prompt.origin)
    grown = [len(timed_mark(video)) - len(VIDEO_MARK) for video in videos]
    ends = [found.end() for found in re.finditer(re.escape(VIDEO_MARK), rendered.text)]

    def moved(place: int) -> int:
        return place + sum(more for end, more in zip(ends, grown, strict=True) if end <= place)

    return Rendered(text, tuple((moved(start), moved(end)) for start, end in rendered.turns))


def with_images(prompt: Prompt, token_ids: Tokens, mask: Mask) -> tuple[Tokens, Mask, tuple[Image, ...]]:
    """Repeats the token of each image as often as it has features. Returns tokens, mask, and the images with their positions.
    Images are never trained."""
    is_place = np.isin(token_ids, [prompt.token_ids[image.places[0]] for image in prompt.images])
    places = sum(image.num_places for image in prompt.images)
    if is_place.sum() != places:
        raise DataError(
            f"{prompt.origin}: {len(prompt.images)} images and videos with {places} places, and {is_place.sum()} of their "
            "tokens in the conversation. The response must not contain an image token without an image."
        )
    placed_ids, placed = with_features(token_ids, is_place, prompt.images)
    repeats = np.ones(len(token_ids), np.int64)
    repeats[is_place] = [image.num_tokens // image.num_places for image in prompt.images for _ in image.places]
    return placed_ids, np.repeat(np.where(is_place, 0, mask).astype(np.uint8), repeats), placed


def conversation(prompt: Prompt) -> Sequence[Message]:
    """The row's messages. If the last one is not the assistant's, the label is appended as the assistant's message."""
    messages = prompt.messages
    assert messages is not None
    if messages[-1]["role"] == ASSISTANT or prompt.label is None:
        return messages
    return [*messages, {"role": ASSISTANT, "content": text_label(prompt)}]


def labelled(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, Mask]:
    """(T,) each: the prompt, and after it the label and the end token, which are trained."""
    if prompt.label is None:
        raise DataError(
            f"{prompt.origin}: a prompt without a response. Pass the column of the response with --label-key, or use "
            "messages with turns of the assistant and pass --apply-chat-template."
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {tokenizer.name_or_path} has no eos_token, which ends a response.")
    text = text_label(prompt)
    response: list[int] = [*tokenizer.encode(text, add_special_tokens=False, verbose=False), tokenizer.eos_token_id]
    mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt.token_ids), len(response)])
    return np.concatenate([prompt.token_ids, np.array(response, np.int32)]), mask


def text_label(prompt: Prompt) -> str:
    label: Any = prompt.label
    if not isinstance(label, str):
        raise DataError(
            f"{prompt.origin}: the label is the response to train on and must be a string, found {label!r:.60} (label_key)."
        )
    return label


def tokenized(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, Mask]:
    """(T,) each: tokens of the whole text, and the mask. A token is trained if any of its characters is in a turn."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path} has no character offsets of tokens. Masks of "
            "conversations require a fast tokenizer (tokenizer.json)."
        )
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    marked = np.zeros(len(rendered.text), np.int64)
    for start, end in rendered.turns:
        marked[start:end] = 1
    up_to = np.concatenate([[0], np.cumsum(marked)])
    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    mask = (up_to[offsets[:, 1]] > up_to[offsets[:, 0]]).astype(np.uint8)
    return np.array(encoded["input_ids"], np.int32), mask
