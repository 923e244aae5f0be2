"""Tokens are those of transformers' `encode`, whatever was set on the tokenizer before."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from slime_plugin_kit.groups import byte_tokenizer
from slime_sources.rendering.plain_encoding import encoded, passes_on

TEXTS = ["", "a", "2+3=<|endoftext|>", "ünï ☃ 漢字", " x\n\ty ", "long " * 400]


def changed(setting: str) -> PreTrainedTokenizerFast:
    # Others keep theirs.
    tokenizer = byte_tokenizer.__wrapped__()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    match setting:
        case "truncation":
            tokenizer.backend_tokenizer.enable_truncation(3)
        case "padding":
            tokenizer.backend_tokenizer.enable_padding(length=512)
        case "split":
            # An earlier call has split special tokens, which holds until the wrapper's next.
            tokenizer.encode("a", split_special_tokens=True)
        case "always split":
            tokenizer.split_special_tokens = True
        case "own encode":

            class Shouting(type(tokenizer)):
                def encode(self, text, **kwargs):
                    return super().encode(text.upper(), **kwargs)

            tokenizer.__class__ = Shouting
    return tokenizer


@pytest.mark.parametrize("setting", ["none", "truncation", "padding", "split", "always split", "own encode"])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_the_wrapper(setting, text):
    expected = changed(setting).encode(text, add_special_tokens=False)
    found = encoded(changed(setting), text)
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_a_plain_tokenizer_is_asked_directly():
    assert passes_on(changed("none"))
    assert not any(passes_on(changed(setting)) for setting in ("truncation", "padding", "split", "own encode"))
