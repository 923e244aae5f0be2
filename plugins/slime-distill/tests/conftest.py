"""Parts by the name that a run file would use, batches, and tokenizers of one character per token with chat templates."""

from __future__ import annotations

from importlib.metadata import entry_points

import numpy as np
import pytest

from slime_core.types.batch import Batch
from slime_models.new_model import character_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=<>;!? "
HEADERS = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
# A thought is shown in the last message only, so that the same turn reads differently once others follow.
LOOKS_BACK = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}!{% endif %}"
    "{{ m.content }};{% endfor %}"
)
TEMPLATES = {
    "plain": HEADERS + PROMPT,
    "marked": MARKED + PROMPT,
    "looks_back": LOOKS_BACK + PROMPT,
    "fails": "{{ raise_exception('only two roles') }}",
}


@pytest.fixture
def part():
    def build(group, name, **options):
        driver = entry_points(group=group)[name].load()
        return driver.build(driver.Config(**options))

    return build


@pytest.fixture
def tokenizer():
    """`tokens` are longer ones that win over the characters that they consist of."""

    def make(template="plain", tokens=()):
        made = character_tokenizer(ALPHABET, tokens)
        made.chat_template = TEMPLATES[template]
        return made

    return make


@pytest.fixture
def make_batch():
    """One sample for each mask, each a group of its own unless given."""

    def make(masks, rewards=None, credit_key=None):
        count = len(masks)
        response_length = np.array([len(mask) for mask in masks], np.int32)
        response = int(response_length.sum())
        return Batch(
            index=np.arange(count),
            group_index=np.arange(count),
            rollout_id=np.arange(count),
            credit_key=np.arange(count) if credit_key is None else np.asarray(credit_key, np.int64),
            reward=np.full(count, np.nan) if rewards is None else np.asarray(rewards, np.float64),
            truncated=np.zeros(count, bool),
            prompt_length=np.ones(count, np.int32),
            response_length=response_length,
            tokens=np.zeros(response + count, np.int32),
            mask=np.array([bit for mask in masks for bit in mask], np.uint8),
            rollout_log_probs=np.zeros(response, np.float32),
            version=np.zeros(response, np.int32),
        )

    return make
