"""Generators: one prompt to one or more samples, with an engine that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slime_core.contracts.generator import Generator
from slime_core.errors import EngineError
from slime_core.rollout.episode import EngineEpisode
from slime_core.rollout.groups import check_samples
from slime_core.types.sample import Sample, Status, VersionSpan
from slime_plugin_kit.case import Case
from slime_plugin_kit.event_loop import run
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import BUDGET, client_of, episode_of, trained_pairs, vocab_size


def engine(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(vocab_size=vocab_size(), **options)


async def generate(generator: Generator, episode: EngineEpisode) -> Sequence[Sample]:
    return check_samples(await generator.generate(episode), generator)


@contextlib.asynccontextmanager
async def built(case: Case) -> AsyncIterator[Generator]:
    generator: Generator = case.build()
    try:
        yield generator
    finally:
        await generator.close()


async def fresh_samples(case: Case, number: int = 3, **options: Any) -> Sequence[Sample]:
    async with built(case) as generator:
        return await generate(generator, episode_of(client_of(engine()), number, **options))


def require_same_samples(what: str, got: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert len(got) == len(expected), f"{what}: {len(got)} samples, {len(expected)} otherwise"
    for one, other in zip(got, expected, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            same = np.array_equal(getattr(one, name), getattr(other, name))
            assert same, f"{what}: {name} are {getattr(one, name)}, {getattr(other, name)} otherwise"
        assert one.status == other.status, f"{what}: status {one.status}, {other.status} otherwise"


async def samples_of(case: Case, numbers: Sequence[int], **options: Any) -> list[Sample]:
    """Samples of one prompt after another, by one generator."""
    async with built(case) as generator:
        episodes = (episode_of(client_of(engine()), number, **options) for number in numbers)
        return [sample for episode in episodes for sample in await generate(generator, episode)]


def test_lengths_agree(case: Case) -> None:
    for sample in run(samples_of(case, range(12))):
        prompt = sample.prompt.token_ids
        assert np.array_equal(sample.tokens[: len(prompt)], prompt), "the tokens do not begin with the prompt's"
        length = sample.response_length
        assert {len(sample.loss_mask), len(sample.rollout_log_probs)} == {length}, (
            f"{length} response tokens, {len(sample.loss_mask)} of the mask, {len(sample.rollout_log_probs)} log-probs"
        )
        tools = sample.rollout_log_probs[sample.loss_mask == 0]
        assert not tools.any(), f"log-probs of tokens that no policy sampled must be 0, they are {tools}"


def test_trained_tokens_are_the_engines(case: Case) -> None:
    async def scene() -> None:
        async with built(case) as generator:
            for number in range(12):
                scripted = engine()
                check(scripted, await generate(generator, episode_of(client_of(scripted), number)))

    def check(scripted: ScriptedEngine, samples: Sequence[Sample]) -> None:
        reported = Counter(
            (int(token), float(log_prob))
            for completion in scripted.completions
            for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
        )
        invented = [pair for sample in samples for pair in trained_pairs([sample]) if pair not in reported]
        assert not invented, f"trained tokens with log-probs that no engine reported: {invented[:5]}"
        for sample in samples:
            covered = np.zeros(sample.response_length, np.bool_)
            for _, start, end in sample.spans:
                covered[start:end] = True
            unknown = np.flatnonzero((sample.loss_mask == 1) & ~covered)
            assert not len(unknown), f"no span has the policy version of the tokens {unknown.tolist()}"

    run(scene())


def test_the_budget_is_kept(case: Case) -> None:
    for budget in (1, 3, BUDGET):
        for sample in run(samples_of(case, range(6), budget=budget)):
            written = int(sample.loss_mask.sum())
            assert written <= budget, f"of a budget of {budget} tokens it has the model write {written}"


def test_an_abort_ends_it(case: Case) -> None:
    async def scene(before: bool) -> Sequence[Sample]:
        scripted, stop = engine(held=True), asyncio.Event()
        client = client_of(scripted)
        episode = episode_of(client, stop=stop)
        if before:
            stop.set()
        async with built(case) as generator:
            task = asyncio.create_task(generate(generator, episode))
            begun = asyncio.create_task(scripted.begun.wait())
            await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            stop.set()
            while not task.done():
                await client.abort(episode.request_ids)
                await asyncio.sleep(0.001)
            return await task

    for before in (False, True):
        samples = run(scene(before))
        aborted = [sample for sample in samples if sample.status is Status.ABORTED]
        statuses = [str(sample.status) for sample in samples]
        assert aborted, f"after an abort its samples are {statuses}: one must have the status aborted"


def test_engine_errors_surface(case: Case) -> None:
    async def scene() -> Sequence[Sample]:
        async with built(case) as generator:
            return await generate(generator, episode_of(client_of(engine(failure=EngineError("the engine died")))))

    try:
        samples = run(scene())
    except EngineError:
        return
    raise AssertionError(f"the engine died, and it returns {len(samples)} samples as if nothing had happened")


def test_episodes_keep_apart(case: Case) -> None:
    async def together() -> list[Sequence[Sample]]:
        client = client_of(engine())
        async with built(case) as generator:
            return await asyncio.gather(*(generate(generator, episode_of(client, number)) for number in range(8)))

    for number, got in enumerate(run(together())):
        require_same_samples(f"prompt {number} beside seven others", got, run(fresh_samples(case, number)))


def test_a_retry_repeats_the_response(case: Case) -> None:
    for number in range(4):
        first, again = run(fresh_samples(case, number)), run(fresh_samples(case, number, attempt=1))
        require_same_samples("generated a second time", again, first)


def test_a_partial_rollout_continues(case: Case) -> None:
    for number in range(4):
        first, *others = run(fresh_samples(case, number))
        if others:
            # Responses of several samples start anew.
            continue
        kept_length = first.response_length // 2
        kept = replace(
            first,
            tokens=first.tokens[: first.prompt_length + kept_length],
            loss_mask=first.loss_mask[:kept_length],
            rollout_log_probs=first.rollout_log_probs[:kept_length],
            spans=tuple(VersionSpan(1, s, min(e, kept_length)) for _, s, e in first.spans if s < kept_length),
            status=Status.ABORTED,
        )
        sample, *_ = run(fresh_samples(case, number, kept=kept))
        begun = sample.tokens[: len(kept.tokens)]
        assert np.array_equal(begun, kept.tokens), f"it was given {kept.tokens} to resume from, and has {sample.tokens}"
        begun_log_probs = sample.rollout_log_probs[:kept_length]
        assert np.array_equal(begun_log_probs, kept.rollout_log_probs), (
            "the kept tokens have other log-probs than before"
        )
        assert not kept.spans or sample.spans[0].version == 1, "the kept tokens have another policy version"


def test_a_response_without_room_is_a_sample(case: Case) -> None:
    number = 3
    length = len(episode_of(client_of(engine()), number).prompt.token_ids)
    samples = run(fresh_samples(case, number, max_context_len=length))
    assert samples, "it returns no sample where the context has no room for a response"
    written = [int(sample.loss_mask.sum()) for sample in samples]
    assert not any(written), f"there is no room for a token, and {written} are trained"
