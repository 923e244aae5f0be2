"""Rollout engines, on a tiny random model, beside transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from slime_core.contracts.engine import RolloutEngine
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_plugin_kit.case import Case
from slime_plugin_kit.tiny_model import (
    SERVED,
    buckets_of,
    checksum_of,
    load_plain,
    log_probs_of,
    logits_of,
    make_tiny_model,
    moved,
    named_weights,
    prompts,
)
from slime_plugin_kit.tiny_serving import (
    LONG,
    NATS,
    TEXT,
    ask,
    long,
    play,
    require_true_log_probs,
    tokens_of,
)

A_WHILE_S = 0.05
TRIES = 4
"""Of what a busy machine may prevent."""
DELAYS_S = (A_WHILE_S, 0.01, 0.3)
"""Tried in turn, until new weights come in the middle of a response."""


COMPANY = 96
WAYS: Sequence[dict[str, Any]] = ({}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 4})
"""Sampling parameters; an engine may have separate code for each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", SERVED)


def test_log_probs_equal_those_of_transformers(case: Case, model: Path) -> None:
    plain = load_plain(model)

    async def scene(engine: RolloutEngine) -> None:
        for temperature in (1.0, 0.7, 0.0):
            requests = [ask(n, prompt, temperature=temperature) for n, prompt in enumerate(prompts(6))]
            for request, got in zip(requests, await engine.generate(requests), strict=True):
                require_true_log_probs(plain, request, got)

    play(case, model, scene)


def test_temperature_zero_takes_the_likeliest_token(case: Case, model: Path) -> None:
    plain = load_plain(model)

    async def scene(engine: RolloutEngine) -> None:
        requests = [ask(n, prompt, temperature=0.0) for n, prompt in enumerate(prompts(4, seed=1))]
        for request, got in zip(requests, await engine.generate(requests), strict=True):
            with torch.no_grad():
                logits = logits_of(plain, [*request.token_ids.tolist(), *tokens_of(got)])
            rows = logits[len(request.token_ids) - 1 : -1]
            chosen = rows.gather(1, torch.tensor(tokens_of(got), dtype=torch.int64)[:, None])[:, 0]
            behind = float((rows.max(-1).values - chosen).max())
            assert behind <= NATS, f"a token that it takes is {behind:.3g} nats behind the likeliest one"

    play(case, model, scene)


def test_responses_come_in_the_order_of_requests(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        requests = [ask(n, prompt, max_new_tokens=2 + 5 * (n % 3)) for n, prompt in enumerate(prompts(9, seed=2))]
        responses = await engine.generate(requests)
        names = [response.request_id for response in responses]
        assert names == [request.request_id for request in requests], f"responses come in the order {names}"
        for request, response in zip(requests, responses, strict=True):
            count = len(response.token_ids)
            assert count <= request.sampling.max_new_tokens, f"{count} tokens of {request.sampling.max_new_tokens}"
            spans = [(start, end) for _, start, end in response.spans]
            covered = [token for start, end in spans for token in range(start, end)]
            assert covered == list(range(count)), f"spans {spans} do not cover its {count} tokens in order"

    play(case, model, scene)


def test_a_structural_tag_is_respected_or_refused(case: Case, model: Path) -> None:
    text = "".join(list(TEXT.values())[:3])
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": text}})

    async def scene(engine: RolloutEngine) -> None:
        request = ask(0, prompts(1, seed=3)[0], structural_tag=tag)
        try:
            (got,) = await engine.generate([request])
        except EngineRefused:
            return
        written = "".join(TEXT.get(token, "") for token in tokens_of(got))
        assert written == text, (
            f"constrained to {text!r}, it wrote {written!r}; without guided decoding, raise EngineRefused"
        )

    play(case, model, scene)


def test_its_stream_has_every_response_once(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        requests = [ask(n, prompt, max_new_tokens=2 + 5 * (n % 3)) for n, prompt in enumerate(prompts(9, seed=2))]
        whole = {response.request_id: tokens_of(response) for response in await engine.generate(requests)}
        streamed = [response async for response in engine.stream(requests)]
        names = sorted(response.request_id for response in streamed)
        assert names == sorted(whole), f"the stream returns {names}"
        for response in streamed:
            same = tokens_of(response) == whole[response.request_id]
            assert same, f"streamed, {response.request_id} has other tokens than generated"

    play(case, model, scene)


def test_the_seed_decides_the_tokens(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        def wave(seed: int) -> list[GenerateRequest]:
            return [ask(n, prompt, seed=seed, min_new_tokens=12) for n, prompt in enumerate(prompts(6, seed=3))]

        first, again, other = [await engine.generate(wave(seed)) for seed in (1, 1, 2)]
        for one, two in zip(first, again, strict=True):
            assert tokens_of(one) == tokens_of(two), f"with the same seed: {tokens_of(one)}, then {tokens_of(two)}"
            assert np.array_equal(one.log_probs, two.log_probs), "with the same seed the log-probs have other bits"
        changed = [tokens_of(one) != tokens_of(two) for one, two in zip(first, other, strict=True)]
        assert any(changed), "another seed gives the same tokens for every prompt"

    play(case, model, scene)


def test_company_changes_no_draw(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        # Each way of sampling with prompts and budgets of every length.
        requests = [
            ask(n, prompt, seed=5, max_new_tokens=1 + n * 7 % 13, **WAYS[n % len(WAYS)])
            for n, prompt in enumerate(prompts(COMPANY, seed=9))
        ]
        together = await engine.generate(requests)
        in_turn: list[Completion] = []
        for way in range(len(WAYS)):
            in_turn += await engine.generate(requests[way :: len(WAYS)])
        late: list[asyncio.Future[list[Completion]]] = []
        for number, request in enumerate(reversed(requests)):
            late.append(asyncio.ensure_future(engine.generate([request])))
            if number % 5 == 0:
                await asyncio.sleep(0.01)
        one_by_one = [response for responses in await asyncio.gather(*late) for response in responses]
        for how, responses in (("with those of its kind alone", in_turn), ("one after another", one_by_one)):
            found = {response.request_id: response for response in responses}
            pairs = [(one, found[one.request_id]) for one in together]
            apart = [one.request_id for one, two in pairs if tokens_of(one) != tokens_of(two)]
            assert not apart, (
                f"{len(apart)} of {len(requests)} requests have other tokens {how} than all together: {apart[:5]}"
            )
            off = max(float(np.abs(one.log_probs - two.log_probs).max(initial=0.0)) for one, two in pairs)
            assert off <= NATS, f"log-probs are off by {off:.3g} nats {how}"

    play(case, model, scene)


def test_a_response_ends_where_it_should(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        async def alone(number: int, prompt: npt.ArrayLike, **sampling: Any) -> Completion:
            # One at a time: what runs beside a request may change its last bits.
            (response,) = await engine.generate([ask(number, prompt, **sampling)])
            return response

        for number, prompt in enumerate(prompts(4, seed=4)):
            response = await alone(number, prompt, max_new_tokens=24)
            tokens = tokens_of(response)
            ended = response.finish_reason is FinishReason.STOP
            assert ended or len(tokens) == 24, f"it ends with {response.finish_reason} after {len(tokens)} of 24 tokens"
            assert response.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            # The first token that had not come before: with it as a stop, the response ends there.
            last = max(place for place, token in enumerate(tokens) if token not in tokens[:place])
            stopped = await alone(number, prompt, max_new_tokens=24, stop_token_ids=(tokens[last],))
            short = await alone(number, prompt, max_new_tokens=max(last, 1))
            assert tokens_of(stopped) == tokens[: last + 1], (
                f"stopped at token id {tokens[last]} it gives {tokens_of(stopped)}, without a stop {tokens}"
            )
            assert stopped.finish_reason is FinishReason.STOP, f"at a stop token it ends with {stopped.finish_reason}"
            assert tokens_of(short) == tokens[: max(last, 1)], "with less room it gives other tokens"
            assert last == 0 or short.finish_reason is FinishReason.LENGTH

    play(case, model, scene)


def test_stop_strings_end_a_response(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        def text(tokens: Sequence[int]) -> str:
            # One token per character; the end of the sequence is no character.
            return "".join(TEXT.get(token, "\0") for token in tokens)

        for number, prompt in enumerate(prompts(4, seed=5)):
            (free,) = await engine.generate([ask(number, prompt, max_new_tokens=24)])
            # Up to the first token without text, which an engine may write into the text or not.
            tokens = list(takewhile(TEXT.__contains__, tokens_of(free)))
            if len(tokens) < 3:
                continue
            stop = text(tokens[1:3])
            (got,) = await engine.generate([ask(number, prompt, max_new_tokens=24, stop=(stop,))])
            end = text(tokens).index(stop) + len(stop)
            assert tokens_of(got) == tokens[:end], (
                f"stopped at {stop!r} it gives {text(tokens_of(got))!r} of {text(tokens)!r}"
            )
            assert got.finish_reason is FinishReason.STOP, f"at a stop string it ends with {got.finish_reason}"

    play(case, model, scene)


def test_an_abort_returns_what_there_is(case: Case, model: Path) -> None:
    plain = load_plain(model)

    async def scene(engine: RolloutEngine) -> None:
        requests = [long(0), long(1)]
        for _ in range(TRIES):
            both = asyncio.ensure_future(engine.generate(requests))
            await asyncio.sleep(A_WHILE_S)
            await engine.abort([requests[0].request_id, "test/unknown"])
            third = asyncio.ensure_future(engine.generate([long(2)]))
            aborted, whole = await both
            if aborted.finish_reason is FinishReason.ABORT:
                break
            # On a busy machine this process may have slept until it had ended.
            await third
        assert aborted.finish_reason is FinishReason.ABORT, f"an aborted request ends with {aborted.finish_reason}"
        assert len(aborted.token_ids) < LONG, "an aborted request runs to its end"
        require_true_log_probs(plain, requests[0], aborted, what="log-probs of what there was")
        assert (len(whole.token_ids), whole.finish_reason) == (LONG, FinishReason.LENGTH), "the other one is hit too"
        await asyncio.sleep(0)
        if not third.done():
            await engine.abort()
        (last,) = await third
        assert len(last.log_probs) == len(last.token_ids)
        # Ids may be used again, and the engine continues.
        (again,) = await engine.generate([replace(requests[0], sampling=SamplingParams(max_new_tokens=3))])
        require_true_log_probs(plain, requests[0], again, what="after an abort, log-probs")

    play(case, model, scene)


def test_an_abort_at_once_does_no_harm(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        for turns in range(5):
            request = long(turns)
            for _ in range(TRIES):
                running = asyncio.ensure_future(engine.generate([request]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                while not running.done():
                    # It may still have been on its way.
                    await engine.abort([request.request_id])
                    await asyncio.sleep(0.001)
                (response,) = await running
                if response.finish_reason is FinishReason.ABORT:
                    break
            assert response.finish_reason is FinishReason.ABORT, (
                f"aborted after {turns} turns: {response.finish_reason}"
            )
            (after,) = await engine.generate([ask(90 + turns, [3, 4], max_new_tokens=2)])
            assert len(after.token_ids) > 0, f"after an abort in turn {turns} it returns no token"

    play(case, model, scene)


def test_pause_holds_every_response(case: Case, model: Path) -> None:
    async def held(engine: RolloutEngine, number: int, turns: int) -> bool:
        """False: it had ended before the pause, because this process had no turn for a moment."""
        request = ask(number, [3, 4], max_new_tokens=4, min_new_tokens=4)
        waiting = asyncio.ensure_future(engine.generate([request]))
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.pause()
        for _ in range(10):
            await asyncio.sleep(0)
        ended_before = waiting.done()
        await asyncio.sleep(2 * A_WHILE_S)
        assert waiting.done() is ended_before, "paused, it returns a response"
        await engine.resume()
        (response,) = await waiting
        assert len(response.token_ids) == 4, f"held for a while, it has {len(response.token_ids)} of 4 tokens"
        return not ended_before

    async def scene(engine: RolloutEngine) -> None:
        # At once, and while the request is on its way in.
        for turns in range(3):
            for attempt in range(5):
                if await held(engine, 10 * turns + attempt, turns):
                    break
            else:
                raise AssertionError("it never holds a response: each ends before the pause that follows it at once")

    play(case, model, scene)


def test_new_weights_are_used_under_their_version(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        assert await engine.version() == -1, f"before the first load its version is {await engine.version()}, not -1"
        for version, seed in ((4, 1), (5, 2)):
            new = moved(load_plain(model, torch.float32), seed)
            weights = named_weights(new)
            await engine.pause()
            for bucket in buckets_of(weights, version, 3):
                assert await engine.version() != version, "a version that is partly loaded is reported as loaded"
                await engine.load_bucket(bucket)
            await engine.resume()
            assert await engine.version() == version, f"loaded {version}, it reports {await engine.version()}"
            requests = [ask(n, prompt) for n, prompt in enumerate(prompts(4, seed=7))]
            for request, got in zip(requests, await engine.generate(requests), strict=True):
                require_true_log_probs(new.double(), request, got, what=f"log-probs under version {version}")
                given = {span.version for span in got.spans}
                assert given <= {version}, f"under version {version} the spans have {given}"

    play(case, model, scene)


def test_its_checksum_is_that_of_the_weights(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        for version in (1, 2):
            weights = named_weights(moved(load_plain(model, torch.float32), version))
            await engine.pause()
            for bucket in buckets_of(weights, version, 2):
                await engine.load_bucket(bucket)
            await engine.resume()
            assert await engine.checksum() == checksum_of(weights), "the checksum over all weights is another one"

    play(case, model, scene)


def test_a_damaged_bucket_is_refused(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        good = buckets_of(named_weights(moved(load_plain(model, torch.float32), 3)), 6, 2)
        data = good[0].data.copy()
        # The sign of every hundredth number.
        data[3::400] ^= 0x80
        await engine.pause()
        with pytest.raises(EngineError):
            await engine.load_bucket(replace(good[0], data=data))
        await engine.resume()
        request = ask(0, prompts(1, seed=11)[0])
        (got,) = await engine.generate([request])
        require_true_log_probs(
            load_plain(model), request, got, what="after a damaged bucket, log-probs of the old weights"
        )
        await engine.pause()
        for bucket in good:
            await engine.load_bucket(bucket)
        assert await engine.version() == 6, "after a refusal the version cannot be loaded"

    play(case, model, scene)


def test_spans_separate_versions(case: Case, model: Path) -> None:
    one, other = load_plain(model, torch.float32), moved(load_plain(model, torch.float32), 4)
    models = {number: (one, other)[number % 2] for number in range(2 * len(DELAYS_S))}

    async def load(engine: RolloutEngine, version: int) -> None:
        await engine.pause()
        for bucket in buckets_of(named_weights(models[version]), version, 2):
            await engine.load_bucket(bucket)
        await engine.resume()

    async def scene(engine: RolloutEngine) -> None:
        request = long(0)
        for number, delay in enumerate(DELAYS_S):
            before, after = 2 * number, 2 * number + 1
            await load(engine, before)
            running = asyncio.ensure_future(engine.generate([request]))
            await asyncio.sleep(delay)
            await load(engine, after)
            (response,) = await running
            spans = [tuple(span) for span in response.spans]
            # Some engines take longer than others until the first token.
            if [version for version, _, _ in spans] == [before, after]:
                break
        else:
            raise AssertionError(f"weights changed under it from {before} to {after}, and the spans are {spans}")
        for version, start, end in spans:
            with torch.no_grad():
                exact = log_probs_of(models[version], request.token_ids.tolist(), tokens_of(response))[0].numpy()
            apart = np.abs(response.log_probs[start:end] - exact[start:end]).max()
            assert apart <= NATS, f"log-probs of the span of version {version} are off by {apart:.3g} nats"

    play(case, model, scene)


def test_sleep_loses_nothing(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        requests = [ask(n, prompt) for n, prompt in enumerate(prompts(4, seed=8))]
        before = await engine.generate(requests)
        await engine.sleep()
        await engine.wake_up()
        for one, two in zip(before, await engine.generate(requests), strict=True):
            assert tokens_of(one) == tokens_of(two), "after sleep and wake it gives other tokens"
            off = float(np.abs(one.log_probs - two.log_probs).max(initial=0.0))
            assert off <= NATS, f"after sleep and wake log-probs are off by {off:.3g} nats: the weights are others"

    play(case, model, scene)


def test_the_loop_continues_meanwhile(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        running = asyncio.ensure_future(engine.generate([long(0)]))
        turns = 0
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > LONG // 4, f"while it wrote {LONG} tokens the event loop had {turns} turns: it blocks"

    play(case, model, scene)


def test_a_stopped_engine_fails_its_requests(case: Case, model: Path) -> None:
    async def scene(engine: RolloutEngine) -> None:
        await engine.health()
        # Long enough for an engine that is fast while this process waits for its core.
        longest = SamplingParams(max_new_tokens=2 * LONG, min_new_tokens=2 * LONG)
        running = asyncio.ensure_future(engine.generate([replace(long(0), sampling=longest)]))
        await asyncio.sleep(A_WHILE_S)
        await engine.stop()
        with pytest.raises(EngineError):
            await running
        with pytest.raises(EngineError):
            await engine.health()
        with pytest.raises(EngineError):
            await engine.generate([ask(1, [3, 4])])
        await engine.stop()

    play(case, model, scene)
