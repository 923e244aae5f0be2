"""Whatever a plugin raises or returns: the error names the plugin and what it was called on, and has the plugin's own lines."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.algorithm.advantages import estimated, require_array, shaped_rewards
from slime_core.algorithm.loss import require_tokens
from slime_core.atomic_io.storage import check_writable
from slime_core.config.part import PluginSpec
from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs, RewardShaper
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.contracts.reward import SpanRewards
from slime_core.contracts.source import DataSource
from slime_core.data.buffer import DataBuffer, check_state, take_prompts
from slime_core.errors import PluginError, RewardError, RolloutError, SlimeError, StorageError
from slime_core.registry.boundary import error_text, foreign, held, shown, with_name
from slime_core.rollout.counters import middleware_metrics
from slime_core.rollout.middleware_calls import around
from slime_core.rollout.reward_worker import score_group
from slime_core.rollout.rewards import RewardResult, verdict_on
from slime_core.rollout.scoring import ScoringPlan, WeightedReward, rewarded_by
from slime_core.types.batch import TokenColumns
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_sources.group_filtering import decide


def raises(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


def gives(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


def made(contract: type, **methods: Any) -> Any:
    """An object of the contract that does these, and what else is required, with nothing."""
    missing = {name: gives(None) for name in getattr(contract, "__abstractmethods__", ())}
    return with_name(type("Mine", (contract,), {**missing, **methods})(), 'thing "mine.py/it"')


# ---------------------------------------------------------------- the boundary itself


@pytest.mark.parametrize("error", [KeyError("acc"), SystemExit(3), AssertionError(), OverflowError("too large.")])
def test_what_is_raised_becomes_an_error_with_the_plugins_name_and_lines(error: BaseException) -> None:
    with pytest.raises(RewardError) as caught, foreign('reward "mine.py/it"', "score of row 3", error=RewardError):
        raises(error)()
    text = f": {str(error).removesuffix('.')}" if str(error) else ""
    begins = f'reward "mine.py/it", score of row 3: raised {type(error).__name__}{text} (test_boundary.py:'
    assert str(caught.value).startswith(begins)
    assert str(caught.value).endswith("in call).")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [SlimeError("fix it"), StorageError("full"), GeneratorExit()])
def test_what_is_no_error_of_the_plugin_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, foreign("it", "call"):
        raise error
    assert caught.value is error


def test_a_full_disk_is_no_error_of_the_plugin() -> None:
    with pytest.raises(StorageError, match=r"x\.db: no space left"), foreign("it", "call"):
        raise OSError(errno.ENOSPC, "No space left on device", "x.db")


def test_ctrl_c_passes_unless_the_run_handles_it() -> None:
    with pytest.raises(KeyboardInterrupt), foreign("it", "call"):
        raise KeyboardInterrupt

    async def in_a_run() -> None:
        with pytest.raises(PluginError, match="it, call: raised KeyboardInterrupt"), foreign("it", "call"):
            raise KeyboardInterrupt

    asyncio.run(in_a_run())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held() as failed:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(failed.error, PluginError)


async def test_a_cancellation_by_the_run_passes_and_another_one_is_an_error() -> None:
    async def waits() -> None:
        with foreign("it", "call", error=RolloutError):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with (
        pytest.raises(RolloutError, match="it, call: what it awaited was cancelled"),
        foreign("it", "call", error=RolloutError),
    ):
        raise asyncio.CancelledError


def test_exits_are_held_as_errors() -> None:
    with held() as failed:
        sys.exit(3)
    assert isinstance(failed.error, PluginError)
    assert isinstance(failed.raised, SystemExit)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


def test_texts_of_foreign_values_are_short_and_never_raise() -> None:
    assert error_text(Unspeakable()) == "Unspeakable: its text cannot be shown"
    assert shown(Unspeakable()) == "an object of type Unspeakable"
    assert shown(10**9999) == "an object of type int"
    assert len(shown("x" * 10_000)) < 100
    assert "\n\n" not in error_text(ValueError("a\n\n\nb"))


# ---------------------------------------------------------------- kinds of plugins


@pytest.mark.parametrize(
    ("behaves", "expected"),
    [
        (raises(KeyError("acc")), r"raised KeyError: 'acc' \(test_boundary.py:\d+ in call\)"),
        (raises(SystemExit(3)), "raised SystemExit: 3"),
        (gives(None), "returned None; a FilterDecision"),
        (gives(1), "returned 1; a FilterDecision"),
        (
            gives(FilterDecision(keep=True, masked_indices=(7,))),
            r"returned \(7,\); only masked_indices below 2 is required",
        ),
    ],
)
def test_group_filters(make_group: Any, behaves: Any, expected: str) -> None:
    with pytest.raises(PluginError, match=rf'thing "mine.py/it", decide on .*: {expected}'):
        decide(made(GroupFilter, decide=behaves), make_group([0.0, 1.0]))


@pytest.mark.parametrize(
    ("behaves", "expected"),
    [
        (raises(StopIteration()), r"take\(2\): raised StopIteration"),
        (gives(None), r"take\(2\): returned None; a list"),
        (gives([None]), r"take\(2\), position 0: returned None; a Prompt is required"),
        (gives([0, 1, 2]), r"take\(2\): returned \[0, 1, 2\]; a list"),
    ],
)
def test_sources(behaves: Any, expected: str) -> None:
    with pytest.raises(PluginError, match=f'thing "mine.py/it", {expected}'):
        take_prompts(made(DataSource, take=behaves), 2)


def test_a_position_that_cannot_be_saved_is_found_before_a_step_is_trained() -> None:
    source = made(DataSource, state=lambda self: {"seen": np.float32(1)}, observe=gives(None))
    for call in (lambda: check_state(source), lambda: DataBuffer(source, made(GroupFilter)).observe([])):
        with pytest.raises(PluginError, match=r"state: the value\['seen'\] is of type float32, which JSON cannot hold"):
            call()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(10**400, "returned a number too large for a float", id="large"),
        pytest.param(10**9999, "returned a number too large for a float", id="larger than its text may be"),
        (None, "returned None, which is not a number"),
        (1j, "returned 1j, which is not a number"),
        (float("nan"), "returned nan; rewards must be finite"),
        ({1: 0.5}, "returned a number named 1; names are texts"),
        (SpanRewards([("a", "b", 1)]), "raised TypeError"),  # type: ignore[list-item]
        (SpanRewards([], outcome=10**400), "too large for a float"),
    ],
)
def test_values_of_rewards(make_group: Any, value: Any, expected: str) -> None:
    result = verdict_on(make_group([None]).samples[0], value, None, 'reward "mine.py/it" on row 3')
    assert result.failure is not None
    assert str(result.failure).startswith('reward "mine.py/it" on row 3')
    assert expected in str(result.failure)


@pytest.mark.parametrize(
    ("behaves", "expected"),
    [
        (raises(SystemExit(3)), "raised SystemExit: 3 (test_boundary.py:"),
        (raises(KeyError("acc")), "raised KeyError: 'acc' (test_boundary.py:"),
        (gives(1.0), "returned 1.0, not one value for each sample"),
    ],
)
def test_rewards_in_their_worker(make_group: Any, behaves: Any, expected: str) -> None:
    class Mine:
        score = staticmethod(behaves)

    scored: Any = score_group(Mine(), make_group([None]))  # type: ignore[arg-type]
    assert scored.message.startswith(expected)


def test_a_sum_of_rewards_that_is_too_large_is_a_failure(make_group: Any) -> None:
    (sample,) = make_group([None]).samples
    plan = ScoringPlan(rewards=())
    for values in ((1e308, 1e308), (1e308, 1e308, -1e308)):
        verdicts = {str(n): RewardResult(value=value) for n, value in enumerate(values)}
        spec = PluginSpec(group="slime.rewards", name="x", options={})
        large = replace(plan, rewards=tuple(WeightedReward(spec=spec, label=label, weight=2.0) for label in verdicts))
        with pytest.raises(RewardError, match="too large for a float"):
            rewarded_by(large, sample, verdicts)


REQUEST = GenerateRequest(
    request_id="train/4/0", token_ids=np.arange(2, dtype=np.int32), sampling=SamplingParams(max_new_tokens=1), seed=0
)


async def test_middlewares() -> None:
    async def nothing(self: Any, request: Any, call_next: Any) -> None:
        return None

    async def fails(self: Any, request: Any, call_next: Any) -> None:
        sys.exit(3)

    with pytest.raises(PluginError, match=r'"mine.py/it", request train/4/0: returned None; a Completion is required'):
        await around(made(RouterMiddleware, __call__=nothing), gives(None))(REQUEST)
    # An error that is raised is a failed response, which is tried again.
    with pytest.raises(RolloutError, match=r'"mine.py/it", request train/4/0: raised SystemExit: 3'):
        await around(made(RouterMiddleware, __call__=fails), gives(None))(REQUEST)
    with pytest.raises(PluginError, match=r'"mine.py/it", metrics: raised KeyError'):
        middleware_metrics({"it": made(RouterMiddleware, metrics=raises(KeyError("x")))})


@pytest.mark.parametrize(
    ("behaves", "expected"),
    [
        (raises(KeyError("acc")), "estimate: raised KeyError"),
        (gives(None), "estimate: returned None; a Credit"),
        # numpy would repeat one number for all tokens.
        (
            gives(Credit(advantages=np.float32(1))),
            r"estimate of advantages: returned shape \(\); an array of shape \(5,\)",
        ),  # type: ignore[arg-type]
        (
            gives(Credit(advantages=np.ones(1, np.float32))),
            r"estimate of advantages: returned shape \(1,\); an array of shape \(5,\)",
        ),
        (gives(Credit(advantages=np.ones(5, np.float32), returns=np.ones(1, np.float32))), "estimate of returns"),
    ],
)
def test_advantages(make_batch: Any, behaves: Any, expected: str) -> None:
    batch = make_batch([(1, 2), (1, 3)])
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(), kl_penalty=None)
    with pytest.raises(PluginError, match=f'thing "mine.py/it", {expected}'):
        estimated(made(AdvantageEstimator, estimate=behaves), inputs)


@pytest.mark.parametrize(
    ("behaves", "expected"),
    [
        (gives(None), r"returned None; an array of shape \(2,\)"),
        (gives(np.ones(3)), r"returned shape \(3,\); an array of shape \(2,\)"),
        (gives(np.array([1.0, np.nan])), r"returned nan for sample 1 \(group 0\), whose reward is 5.0"),
    ],
)
def test_shapers(make_batch: Any, behaves: Any, expected: str) -> None:
    batch = make_batch([(1, 2), (1, 3)], reward=[4.0, 5.0])
    with pytest.raises(PluginError, match=f'thing "mine.py/it", shape: {expected}'):
        shaped_rewards(made(RewardShaper, shape=behaves), batch.reward, batch, 9)


def test_shapes() -> None:
    import torch

    with pytest.raises(PluginError, match=r"it, correct_batch of keep: returned True; an array of shape \(4,\)"):
        require_array("it", "correct_batch of keep", True, (4,))
    with pytest.raises(PluginError, match=r"it, values: returned shape \(\); a tensor of shape \(4,\)"):
        require_tokens("it", {"values": torch.tensor(1.0)}, torch.ones(4))


# ---------------------------------------------------------------- what a dry run checks


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "mine")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StorageError, match=r"runs is a file. Pass --runs-dir"):
        check_writable(tmp_path / "runs" / "mine")
