"""Data sources: draws, epochs, position and fingerprint."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slime_core.contracts.example import SourceExample
from slime_core.contracts.source import DataSource
from slime_core.errors import SlimeError
from slime_core.registry import bind
from slime_core.types.prompt import Prompt
from slime_plugin_kit.case import Case
from slime_plugin_kit.scripted_rollout import tokenizer
from slime_sources.rendering.prompt_renderer import PromptRenderer

FEW = 20
"""Draws of a source whose epochs have no known length."""


def example_of(case: Case) -> SourceExample:
    return next(iter(case.examples(SourceExample)), SourceExample())


def opened(case: Case, *, seed: int = 1, other: bool = False) -> DataSource:
    """A new source on its own data, or on the other ones that its example names."""
    example = example_of(case)
    factory = case.build()
    if other:
        assert case.subject.resolved is not None
        config = bind(case.subject.resolved, example.other_options or {}, where=case.entry.name)
        factory = case.driver.build(config)
    renderer = PromptRenderer(tokenizer(), input_key=example.input_key, label_key=example.label_key)
    source: DataSource = factory(renderer, seed=seed)
    return source


def epoch_of(source: DataSource) -> int:
    return source.num_rows or FEW


def content_of(prompts: list[Prompt]) -> list[tuple[int, str, str]]:
    return [(prompt.group_index, prompt.origin, prompt.text) for prompt in prompts]


def rows(prompts: list[Prompt]) -> list[str]:
    return [prompt.origin for prompt in prompts]


def test_prompts_are_rendered(case: Case) -> None:
    for prompt in opened(case).take(3):
        assert prompt.token_ids.dtype == np.int32, f"token ids are {prompt.token_ids.dtype}, not int32"
        assert len(prompt.token_ids), f"{prompt.origin} has no tokens"
        assert prompt.origin, "a prompt has no origin"


def test_the_same_seed_gives_the_same_draws(case: Case) -> None:
    one, other = opened(case), opened(case)
    count = 2 * epoch_of(one) + 1
    assert content_of(one.take(count)) == content_of(other.take(count)), "two sources with one seed draw differently"


def test_another_seed_gives_another_order(case: Case) -> None:
    count = epoch_of(opened(case))
    orders = {tuple(rows(opened(case, seed=seed).take(count))) for seed in range(6)}
    assert len(orders) > 1, (
        f"six seeds give one order, {rows(opened(case).take(count))}, though its example declares seeded"
    )


def test_draws_do_not_depend_on_how_many_are_taken(case: Case) -> None:
    one, other = opened(case), opened(case)
    count = epoch_of(one) + 4
    together = content_of(one.take(count))
    single = [entry for _ in range(count) for entry in content_of(other.take(1))]
    assert together == single, "taken one by one the prompts are others"


def test_draws_are_numbered_for_ever(case: Case) -> None:
    source = opened(case)
    numbers = [prompt.group_index for prompt in source.take(2 * epoch_of(source) + 3)]
    assert numbers == list(range(len(numbers))), f"group indices are {numbers}, not 0, 1, 2, …"


def test_an_epoch_has_every_row_once(case: Case) -> None:
    source = opened(case)
    count = source.num_rows
    if count is None:
        return
    first, second = rows(source.take(count)), rows(source.take(count))
    assert len(set(first)) == count, f"{count} rows, and the first epoch draws {sorted(first)}"
    assert set(second) == set(first), f"the second epoch draws other rows: {sorted(set(second) ^ set(first))}"


def test_a_restored_source_continues(case: Case) -> None:
    count = epoch_of(opened(case))
    for drawn in (0, 1, count - 1, count, count + 2):
        source = opened(case)
        source.take(drawn)
        state = json.loads(json.dumps(source.state(), allow_nan=False))
        later = opened(case)
        later.restore(state)
        expected, got = content_of(source.take(count + 2)), content_of(later.take(count + 2))
        assert got == expected, f"restored after {drawn} draws it continues with {got[:3]}, not with {expected[:3]}"
        # And it is possible to go back.
        source.restore(state)
        assert content_of(source.take(count + 2)) == expected, f"restored to {drawn} draws it draws others than before"


def test_the_fingerprint_follows_the_data(case: Case) -> None:
    source = opened(case)
    before = source.fingerprint()
    assert before == opened(case).fingerprint(), "two sources on the same data have different fingerprints"
    source.take(epoch_of(source) + 1)
    assert source.fingerprint() == before, "drawing changes the fingerprint"
    if example_of(case).other_options is not None:
        assert opened(case, other=True).fingerprint() != before, "other data have the same fingerprint"


def test_a_state_of_other_data_is_refused(case: Case) -> None:
    source = opened(case, other=True)
    source.take(1)
    with pytest.raises(SlimeError):
        opened(case).restore(source.state())
