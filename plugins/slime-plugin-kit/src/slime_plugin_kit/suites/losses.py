"""Losses, alone and in the kernel's objective."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from slime_core.algorithm.loss import TokenObjective
from slime_core.contracts.example import LossExample
from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss
from slime_core.contracts.needs import Need
from slime_core.types.microbatch import MicroBatch
from slime_plugin_kit.batches import ORDER, column_of, example_batch, flat, is_given
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.declared import with_declared_alone
from slime_plugin_kit.objectives import EVERY_NEED, everything_of, leaves_of, packed
from slime_plugin_kit.trial import (
    ROUNDING,
    Trial,
    require_any_context_parallel,
    require_any_micro_batches,
    require_any_order,
    require_any_shards,
    require_float32,
    require_same_step,
    require_true_gradient,
    require_zero_gradient,
    require_zero_with_graph,
)  # fmt: skip
from slime_training.segments import LocalSegments


@pytest.fixture
def trial() -> Trial:
    return Trial.fresh()


def objective_of(case: Case, needs: frozenset[Need] = EVERY_NEED) -> TokenObjective:
    return TokenObjective(loss=case.build(), needs=needs, reads_values=case.driver.trains_values)


def whole(trial: Trial) -> MicroBatch:
    return packed(trial.batch, trial.columns, np.arange(trial.batch.num_samples))[0]


def call(loss: PolicyLoss, micro: MicroBatch, leaves: dict[str, Tensor]) -> LossOutput:
    """The loss itself, on everything that there is."""
    return loss(everything_of(micro, leaves), LocalSegments(micro.segments, micro.num_samples))


def test_anchored_by_hand(case: Case) -> None:
    anchors = [(of, example) for of in case.subject.cases for example in of.examples(LossExample)]
    assert anchors, (
        "no numbers worked out by hand: give its driver a classmethod `examples` that returns a "
        "slime_core.contracts.example.LossExample (a factor of 2 shows in nothing else)"
    )
    leaf_name = "values" if case.driver.trains_values else "log_probs"
    for of, example in anchors:
        label = f"with {of.label or 'its defaults'}"
        names = [f.name for f in fields(LossInputs) if f.name != "mask" and is_given(example.samples, f.name)]
        given = {name: torch.tensor(column_of(example.samples, name)) for name in names}
        assert leaf_name in given, f"the samples of its LossExample {label} give no {leaf_name}"
        leaf = given[leaf_name].requires_grad_()
        batch = example_batch(example.samples)
        trained = batch.mask.astype(np.bool_)
        mask = torch.from_numpy(trained)
        segments = LocalSegments(torch.from_numpy(batch.sample_of_token), batch.num_samples)
        output: LossOutput = of.build()(LossInputs(mask=mask, **given), segments)
        torch.where(mask, output.values, 0.0).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None, f"its values do not depend on the {leaf_name}"
        got = output.values.detach().double().numpy()
        require_same(f"values {label}", got[trained], flat(example.values)[trained], tolerance=ROUNDING)
        gradient = np.where(trained, flat(example.gradient), 0.0)
        require_same(f"gradient of the {leaf_name} {label}", leaf.grad.numpy(), gradient, tolerance=ROUNDING)


def test_gradient_equals_finite_differences(case: Case, trial: Trial) -> None:
    require_true_gradient(objective_of(case), trial)


def test_float32_agrees_with_float64(case: Case, trial: Trial) -> None:
    require_float32(objective_of(case), trial)


def test_packing_and_order_change_nothing(case: Case, trial: Trial) -> None:
    require_any_order(objective_of(case), trial, trial.taken(ORDER))


def test_micro_batches_change_nothing(case: Case, trial: Trial) -> None:
    require_any_micro_batches(objective_of(case), trial)


def test_data_parallel_shards_change_nothing(case: Case, trial: Trial) -> None:
    require_any_shards(objective_of(case), trial)


def test_context_parallel_shards_change_nothing(case: Case, trial: Trial) -> None:
    require_any_context_parallel(objective_of(case), trial)


def test_masked_tokens_change_nothing(case: Case, trial: Trial) -> None:
    objective = objective_of(case)
    dirty = trial.poisoned()
    output = call(case.build(), whole(dirty), leaves_of(dirty.policy, objective, torch.float64))
    finite = torch.isfinite(output.values).numpy()
    assert finite.all(), (
        f"values are not finite at tokens {np.flatnonzero(~finite).tolist()} once masked tokens hold NaN and infinity: "
        "select with torch.where(mask, x, 0.0), never multiply by the mask"
    )
    clean = trial.train(objective)
    require_same_step("with NaN and infinity at masked tokens", dirty.train(objective), clean, tolerance=1e-12)


def test_a_fully_masked_batch_gives_zero_with_a_graph(case: Case, trial: Trial) -> None:
    require_zero_with_graph(objective_of(case), trial.masked())


def test_an_empty_micro_batch_gives_zero_with_a_graph(case: Case, trial: Trial) -> None:
    objective = objective_of(case)
    require_zero_with_graph(objective, trial, [()])
    # A rank with no token beside one that has it: it reduces as often, or the other one waits for ever.
    alone = trial.train(objective, [(7,)])
    require_same_step("one token over three ranks", trial.train(objective, [(7,)], cp_size=3), alone)


def test_zero_advantages_give_zero_gradient(case: Case, trial: Trial) -> None:
    zeros = np.zeros(len(trial.batch.mask), np.float32)
    trial = replace(trial, columns=replace(trial.columns, advantages=zeros))
    require_zero_gradient(trial.train(objective_of(case)))


def test_undeclared_inputs_are_not_needed(case: Case, trial: Trial) -> None:
    needs = frozenset(case.driver.needs)
    expected = trial.train(objective_of(case))
    if not case.driver.uses_advantages:
        trial = replace(trial, columns=replace(trial.columns, advantages=None, returns=None))
    with with_declared_alone(needs) as label:
        got = trial.train(objective_of(case, needs))
    require_same_step(label, got, expected, tolerance=0)


def test_declared_needs_are_read(case: Case) -> None:
    unread = [need for need in sorted(case.driver.needs) if not any(reads(of, need) for of in case.subject.cases)]
    assert not unread, f"{', '.join(unread)} changes nothing under any of its options: leave it out of `needs`"


def reads(case: Case, need: Need) -> bool:
    """Whether its values, gradient or metrics change with this input."""
    trial, loss = Trial.fresh(), case.build()
    moved = trial.moved(need)
    results = []
    for of in (trial, moved):
        leaves = leaves_of(of.policy, objective_of(case), torch.float64)
        output = call(loss, whole(of), leaves)
        gradient = torch.autograd.grad(output.values.sum(), list(leaves.values()), allow_unused=True)
        results.append([output.values, *output.metrics.values(), *(part for part in gradient if part is not None)])
    one, other = results
    return len(one) != len(other) or not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_extreme_log_ratios_stay_finite(case: Case, trial: Trial) -> None:
    far = np.where(np.arange(len(trial.batch.mask)) % 2, 1e4, -1e4)
    for sign in (1, -1):
        policy = replace(trial.policy, log_probs=trial.policy.log_probs + sign * far)
        got = replace(trial, policy=policy).train(objective_of(case), dtype=torch.float32)
        assert np.isfinite(got.loss), f"the loss is {got.loss}: clamp log-ratios to [-20, 20] before exp"
        for name, column in got.gradient.items():
            assert np.isfinite(column).all(), f"the gradient of the {name} is not finite: clamp before exp"


def test_metrics_are_per_token_and_detached(case: Case, trial: Trial) -> None:
    micro = whole(trial)
    for dtype in (torch.float32, torch.float64):
        output = call(case.build(), micro, leaves_of(trial.policy, objective_of(case), dtype))
        shape = tuple(micro.mask.shape)
        assert output.values.shape == shape, f"values have shape {tuple(output.values.shape)}, not {shape}"
        assert output.values.dtype == dtype, f"values are {output.values.dtype} where the log-probs are {dtype}"
        for name, metric in output.metrics.items():
            assert metric.shape == shape, f"metric {name} has shape {tuple(metric.shape)}, not {shape}"
            assert not metric.requires_grad, f"metric {name} carries a gradient: detach it"
            assert torch.isfinite(metric[micro.mask]).all(), f"metric {name} is not finite at trained tokens"


def test_inputs_are_left_alone(case: Case, trial: Trial) -> None:
    loss, micro = case.build(), whole(trial)
    leaves = leaves_of(trial.policy, objective_of(case), torch.float64)
    given = {"mask": micro.mask, **tensors_of(micro), **leaves}
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    first = call(loss, micro, leaves)
    written = [name for name, tensor in given.items() if not torch.equal(tensor.detach(), before[name])]
    assert not written, f"it writes into {', '.join(written)}"
    second = call(loss, micro, leaves)
    assert torch.equal(first.values, second.values), "called twice, it gives two results: a loss keeps no state"


def tensors_of(micro: MicroBatch) -> dict[str, Tensor]:
    columns = {f.name: getattr(micro.columns, f.name) for f in fields(micro.columns)}
    return {f"columns.{name}": column for name, column in columns.items() if column is not None}
