"""Prompt renderers: rows to tokens, and the rows that are refused."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pytest

from slime_core.contracts.renderer import Renderer, RendererFactory, RenderSettings
from slime_core.errors import DataError
from slime_core.types.prompt import Prompt
from slime_plugin_kit.case import Case
from slime_plugin_kit.scripted_rollout import tokenizer

ORIGIN: Final = "train.jsonl, line 3"
ROW: Final = {"question": "1+1=", "answer": "2", "notes": {"level": 1}}
KEYS: Final[dict[str, Any]] = {"input_key": "question", "label_key": "answer", "metadata_key": "notes"}


def made(case: Case, **settings: Any) -> Renderer:
    factory: RendererFactory = case.build()
    renderer = factory(tokenizer(), RenderSettings(**KEYS, **settings), None)
    assert isinstance(renderer, Renderer), f"its factory returns {renderer!r}, not a Renderer"
    return renderer


def rendered(renderer: Renderer, row: dict[str, Any], number: int = 0) -> Prompt:
    return renderer.render(row, group_index=number, origin=ORIGIN)


def test_a_row_becomes_a_prompt(case: Case) -> None:
    prompt = rendered(made(case), ROW, 7)
    assert prompt.token_ids.dtype == np.int32, f"token ids are {prompt.token_ids.dtype}, not int32"
    assert len(prompt.token_ids), "it has no tokens"
    assert (prompt.group_index, prompt.origin) == (7, ORIGIN), "it has another group index or origin"
    assert prompt.label == "2", f"its label is {prompt.label!r}, not the row's"
    assert prompt.metadata.get("level") == 1, f"its metadata are {prompt.metadata}, without the row's"
    json.dumps([prompt.messages, prompt.tools, prompt.metadata])


def test_renders_the_same_twice(case: Case) -> None:
    one, other = made(case), made(case)
    for number in range(3):
        row = ROW | {"question": f"{number}+1="}
        expected, found = rendered(one, row, number), rendered(other, row, number)
        assert (found.text, found.token_ids.tolist()) == (expected.text, expected.token_ids.tolist())
        again = rendered(one, row, number)
        assert again.token_ids.tolist() == expected.token_ids.tolist(), "a second call renders other tokens"


def test_a_missing_key_is_an_error(case: Case) -> None:
    for key in ("question", "answer"):
        with pytest.raises(DataError) as caught:
            rendered(made(case), {name: value for name, value in ROW.items() if name != key})
        assert str(caught.value).startswith(f"{ORIGIN}: "), f"the message is: {caught.value}"


def test_long_prompts_are_refused(case: Case) -> None:
    length = len(rendered(made(case), ROW).token_ids)
    for limit, least in (("max_prompt_len", length), ("context_len", length + 1)):
        fits, short = made(case, **{limit: least}), made(case, **{limit: least - 1})
        assert fits.accepts(rendered(fits, ROW)), f"{limit} = {least} refuses a prompt of {length} tokens"
        assert not short.accepts(rendered(short, ROW)), f"{limit} = {least - 1} accepts {length} tokens"
        assert str(least - 1) in short.limit, f"`limit` does not name {limit}: {short.limit}"
