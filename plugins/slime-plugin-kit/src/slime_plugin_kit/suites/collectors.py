"""Collectors: the groups of a step, with an engine that follows a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from slime_core.config.rollout import RolloutConfig
from slime_core.config.run import DataConfig
from slime_core.contracts.example import CollectorExample
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.errors import SlimeError
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import GroupRunner, GroupSettings
from slime_core.rollout.single_turn import SingleTurn
from slime_core.types.completion import SamplingParams
from slime_core.types.sample import SampleGroup
from slime_plugin_kit.case import Case
from slime_plugin_kit.event_loop import run
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import BUDGET, SEED, NumberedPrompts, client_of, tokenizer, vocab_size


class DropsEveryThird(GroupFilter):
    def decide(self, group: SampleGroup) -> FilterDecision:
        return FilterDecision(keep=group.group_index % 3 != 1, reason="third")


@dataclass
class Collected:
    """What some steps gave, and what was left behind."""

    steps: list[list[SampleGroup]] = field(default_factory=list)
    observed: list[tuple[int, list[SampleGroup]]] = field(default_factory=list)
    num_drawn: int = 0
    waiting: list[int] = field(default_factory=list)
    """Prompts in the buffer."""

    @property
    def prompts(self) -> list[int]:
        return [group.group_index for step in self.steps for group in step]


def shape_of(case: Case) -> CollectorExample:
    return next(iter(case.examples(CollectorExample)), CollectorExample(num_steps=3))


def collect(
    case: Case, *, filters: Sequence[GroupFilter] = (), wave: int | None = None, end: int | None = None
) -> Collected:
    async def steps() -> Collected:
        shape, found = shape_of(case), Collected()
        source = NumberedPrompts(end)
        buffer = DataBuffer(source, PopFirstFilter())
        collector = case.build()
        config = RolloutConfig(
            rollout_batch_size=shape.rollout_batch_size,
            n_samples_per_prompt=shape.n_samples_per_prompt,
            rollout_max_response_len=BUDGET,
            over_sampling_batch_size=wave,
        )
        for step in range(shape.num_steps):
            context = RolloutContext(
                config=config,
                data=DataConfig(),
                tokenizer=tokenizer(),
                buffer=buffer,
                runner=runner_of(shape) if case.driver.needs_engine(case.config) else None,
                filters=filters,
                observe=lambda step, accepted, refused: found.observed.append((step, list(accepted))),
            )
            found.steps.append(await collector.collect(step, context))
        found.num_drawn = source.num_drawn
        found.waiting = [item.prompt.group_index for item in buffer.items]
        return found

    return run(steps())


def runner_of(shape: CollectorExample) -> GroupRunner:
    return GroupRunner(
        GroupSettings(
            scope="train",
            num_samples=shape.n_samples_per_prompt,
            sampling=SamplingParams(max_new_tokens=BUDGET),
            seed=SEED,
            max_context_len=None,
            scoring=None,
            evaluation=False,
            max_retries=0,
        ),
        generator=SingleTurn(),
        client=client_of(ScriptedEngine(vocab_size=vocab_size())),
        tokenizer=tokenizer(),
        rewards=None,
        on_failure=lambda failure: None,
    )


def test_a_step_has_the_requested_groups(case: Case) -> None:
    shape = shape_of(case)
    for groups in collect(case).steps:
        sizes = [len(group.samples) for group in groups]
        assert sizes == [shape.n_samples_per_prompt] * shape.rollout_batch_size, (
            f"for {shape.rollout_batch_size} groups of {shape.n_samples_per_prompt} it gives groups of {sizes}"
        )
        order = [group.samples[0].index for group in groups]
        assert order == sorted(order), f"groups come in the order {order}, not as they were submitted"


def test_collects_the_same_twice(case: Case) -> None:
    first, second = collect(case), collect(case)
    assert first.prompts == second.prompts, f"prompts {first.prompts}, then {second.prompts}"
    for one, other in zip(first.steps, second.steps, strict=True):
        for group, again in zip(one, other, strict=True):
            for sample, repeated in zip(group.samples, again.samples, strict=True):
                assert np.array_equal(sample.tokens, repeated.tokens), "the same prompts get other responses"


def test_its_observer_gets_every_step(case: Case) -> None:
    found = collect(case)
    heard = [(step, [group.group_index for group in groups]) for step, groups in found.observed]
    given = [(step, [group.group_index for group in groups]) for step, groups in enumerate(found.steps)]
    assert heard == given, f"observed {heard}, collected {given}"


def test_no_prompt_is_lost_or_used_twice(case: Case) -> None:
    for wave in (None, shape_of(case).rollout_batch_size + 3):
        for filters in ((), (DropsEveryThird(),)):
            found = collect(case, filters=filters, wave=wave)
            used = found.prompts + found.waiting
            assert len(set(used)) == len(used), f"prompts are used or kept twice: {sorted(used)}"
            lost = sorted(set(range(found.num_drawn)) - set(used))
            dropped = [number for number in lost if number % 3 == 1] if filters else []
            assert lost == dropped, f"prompts {sorted(set(lost) - set(dropped))} were drawn, and are nowhere"


def test_refused_groups_are_replaced(case: Case) -> None:
    found = collect(case, filters=(DropsEveryThird(),))
    assert all(number % 3 != 1 for number in found.prompts), (
        f"a filter drops every third group; it gives {found.prompts}"
    )
    expected = shape_of(case).rollout_batch_size * shape_of(case).num_steps
    assert len(found.prompts) == expected, f"{len(found.prompts)} groups, not {expected}"


def test_the_end_of_the_data_is_an_error(case: Case) -> None:
    with pytest.raises(SlimeError):
        collect(case, end=1)
