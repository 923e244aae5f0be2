"""Advantage estimators, on the whole batch."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from slime_core.contracts.advantage import Credit, CreditInputs
from slime_core.contracts.example import AdvantageExample
from slime_core.contracts.needs import Need
from slime_core.types.batch import Float32
from slime_plugin_kit.batches import ORDER, column_of, example_batch, example_columns, flat, is_given
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.declared import with_declared_alone
from slime_plugin_kit.trial import Trial

FLOAT32 = 1e-5
"""Advantages are float32."""


@pytest.fixture
def trial() -> Trial:
    fresh = Trial.fresh()
    scores = replace(fresh.columns, advantages=None, returns=None, loss_weight=None)
    return replace(fresh, columns=scores)


def credit(case: Case, trial: Trial, penalty: Float32 | None = None) -> Credit:
    inputs = CreditInputs(batch=trial.batch, rewards=trial.batch.reward, columns=trial.columns, kl_penalty=penalty)
    given: Credit = case.build().estimate(inputs)
    shape = trial.batch.mask.shape
    assert given.advantages.shape == shape, f"advantages have shape {given.advantages.shape}, not {shape}"
    assert given.advantages.dtype == np.float32, f"advantages are {given.advantages.dtype}, not float32"
    if given.returns is not None:
        assert given.returns.shape == shape, f"returns have shape {given.returns.shape}, not {shape}"
    if given.sample_credit is not None:
        count = (trial.batch.num_samples,)
        assert given.sample_credit.shape == count, f"sample_credit has shape {given.sample_credit.shape}, not {count}"
    return given


def columns_of(given: Credit, trial: Trial) -> dict[str, Float32]:
    """At trained tokens."""
    columns = {"advantages": given.advantages, "returns": given.returns}
    return {name: column[trial.mask] for name, column in columns.items() if column is not None}


def require_same_credit(what: str, got: dict[str, Float32], expected: dict[str, Float32], tolerance: float) -> None:
    assert set(got) == set(expected), f"{what}: it gives {sorted(got)}, and {sorted(expected)} before"
    for name, column in expected.items():
        require_same(f"{what}: {name} at trained tokens", got[name], column, tolerance=tolerance)


def test_anchored_by_hand(case: Case) -> None:
    anchors = [(of, example) for of in case.subject.cases for example in of.examples(AdvantageExample)]
    assert anchors, (
        "no numbers worked out by hand: give its driver a classmethod `examples` that returns a "
        "slime_core.contracts.example.AdvantageExample"
    )
    for of, example in anchors:
        label = f"with {of.label or 'its defaults'}"
        batch = example_batch(example.samples)
        penalty = None
        if is_given(example.samples, "kl_penalty"):
            penalty = column_of(example.samples, "kl_penalty").astype(np.float32)
        there = Trial(batch=batch, columns=example_columns(example.samples), policy=Trial.fresh().policy)
        got = credit(of, there, penalty)
        expected = {"advantages": flat(example.advantages)}
        if example.returns is not None:
            expected["returns"] = flat(example.returns)
        returned = {"advantages": got.advantages, "returns": got.advantages if got.returns is None else got.returns}
        for name, numbers in expected.items():
            require_same(f"{name} {label}", returned[name][there.mask], numbers[there.mask], tolerance=FLOAT32)


def test_equal_rewards_give_zero(case: Case, trial: Trial) -> None:
    equal = replace(trial, batch=replace(trial.batch, reward=np.full(trial.batch.num_samples, 0.3)))
    got = credit(case, equal).advantages[trial.mask]
    assert (got == 0).all(), f"with equal rewards the advantages reach {np.abs(got).max():.3g}"


def test_comparing_is_declared(case: Case, trial: Trial) -> None:
    equal = replace(trial, batch=replace(trial.batch, reward=np.full(trial.batch.num_samples, 0.3)))
    teaches, silent = (credit(case, of).advantages[of.mask].any() for of in (trial, equal))
    assert silent or not teaches, (
        "with equal rewards all advantages are 0: it compares, and one response per prompt would teach nothing. Let "
        "`compares_group` of its driver return True"
    )


def test_masked_tokens_change_nothing(case: Case, trial: Trial) -> None:
    clean, dirty = credit(case, trial), credit(case, trial.poisoned())
    what = "with NaN and infinity at masked tokens"
    require_same_credit(what, columns_of(dirty, trial), columns_of(clean, trial), tolerance=0)


def test_masked_tokens_are_skipped(case: Case, trial: Trial) -> None:
    """Without the tokens of tools the result is the same: they cost no discount, get no reward and count in no mean."""
    short = trial.without_masked()
    what = "without the masked tokens"
    require_same_credit(what, columns_of(credit(case, trial), trial), columns_of(credit(case, short), short), FLOAT32)


def test_packing_and_order_change_nothing(case: Case, trial: Trial) -> None:
    other = trial.taken(ORDER)
    rows = trial.batch.response_rows(np.array(ORDER))
    whole, moved = credit(case, trial), credit(case, other)
    expected = columns_of(replace_columns(whole, rows), other)
    require_same_credit(f"samples in the order {ORDER}", columns_of(moved, other), expected, FLOAT32)


def replace_columns(given: Credit, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Credit:
    returns = None if given.returns is None else given.returns[rows]
    return replace(given, advantages=given.advantages[rows], returns=returns)


def test_odd_samples_are_harmless(case: Case, trial: Trial) -> None:
    alone = (10,)
    empty = (4,)
    for label, there in {
        "the whole batch": trial,
        "a fully masked batch": trial.masked(),
        "a group of one": trial.taken(alone),
        "a batch of one empty response": trial.taken(empty),
    }.items():
        got = credit(case, there)
        for name, column in columns_of(got, there).items():
            assert np.isfinite(column).all(), f"{label}: {name} of trained tokens are not finite: {column}"


def test_undeclared_inputs_are_not_needed(case: Case, trial: Trial) -> None:
    expected = credit(case, trial)
    needs = case.driver.needs
    alone = replace(trial, columns=trial.columns.only({need.value for need in needs}))
    with with_declared_alone(needs) as label:
        got = credit(case, alone)
    require_same_credit(label, columns_of(got, trial), columns_of(expected, trial), tolerance=0)


def test_declared_needs_are_read(case: Case, trial: Trial) -> None:
    unread = [n for n in sorted(case.driver.needs) if not any(reads(of, n, trial) for of in case.subject.cases)]
    assert not unread, f"{', '.join(unread)} changes nothing under any of its options: leave it out of `needs`"


def reads(case: Case, need: Need, trial: Trial) -> bool:
    before, after = credit(case, trial), credit(case, trial.moved(need))
    one, other = columns_of(before, trial), columns_of(after, trial)
    return any(not np.array_equal(one[name], other[name]) for name in one)


def test_the_kl_penalty_counts(case: Case, trial: Trial) -> None:
    zeros = np.zeros(len(trial.batch.mask), np.float32)
    without = credit(case, trial)
    same = columns_of(credit(case, trial, zeros), trial)
    require_same_credit("a penalty of 0", same, columns_of(without, trial), tolerance=FLOAT32)
    for token in np.flatnonzero(trial.mask):
        penalty = zeros.copy()
        penalty[token] = 0.25
        got = credit(case, trial, penalty).advantages[token]
        assert got < without.advantages[token], (
            f"a KL penalty of 0.25 at token {token} moves its advantage from {without.advantages[token]:.4g} to "
            f"{got:.4g}: it must fall"
        )


def test_inputs_are_left_alone(case: Case, trial: Trial) -> None:
    for holder in (trial.batch, trial.columns):
        for f in fields(holder):
            column = getattr(holder, f.name)
            if isinstance(column, np.ndarray):
                # As in shared memory: a write raises ValueError.
                column.flags.writeable = False
    first, second = credit(case, trial), credit(case, trial)
    require_same_credit("called twice", columns_of(second, trial), columns_of(first, trial), tolerance=0)
