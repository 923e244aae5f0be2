"""Megatron trains like slime-fsdp: every installed algorithm, on the same batch, by a step of plain descent."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core import groups
from slime_core.registry import Registry
from slime_plugin_kit.case import Subject
from slime_plugin_kit.recipes import dressed
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import Place, TrainingBatch, opened
from slime_plugin_kit.trial import Trial

pytestmark = pytest.mark.megatron

FLOAT32 = 2e-5
"""Tolerance for sums in another order, relative to the largest number; for log-probs in nats."""
REGISTRY = Registry()
ALGORITHMS = {entry.name: entry for entry in REGISTRY.entries(groups.ALGORITHMS)}
BACKENDS = ("fsdp", "megatron")
ALL = (tuple(range(11)),)
GAP = 0.2
"""How far, in nats, the old policy, the engine, the reference and the teacher lie from the trained weights."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(model=make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def built(name):
    resolved = REGISTRY.resolve(groups.BACKENDS, name, where="backend.name")
    return resolved.driver.build(resolved.driver.Config())


@pytest.fixture(scope="module")
def trial(place):
    """Uneven lengths, an empty response, fully masked samples; log-probs close to those of the model."""
    fresh = Trial.fresh()
    # The trial's tokens are those of a larger vocabulary.
    batch = replace(fresh.batch, tokens=3 + fresh.batch.tokens % 20)
    scores = {}
    for head in ("lm", "value"):
        for name in BACKENDS:
            with opened(built(name), place, head=head) as one:
                scores[head, name] = one.scores(
                    TrainingBatch(batch=batch, columns=fresh.columns), ALL, entropy=head == "lm"
                )
        for column, values in scores[head, "fsdp"].items():
            assert np.abs(values - scores[head, "megatron"][column]).max() <= FLOAT32, column
    rng = np.random.default_rng(3)
    log_probs = scores["lm", "fsdp"]["log_probs"]
    mask = batch.mask.astype(np.bool_)

    def apart():
        return (log_probs + GAP * rng.normal(size=len(mask))).astype(np.float32)

    columns = replace(
        fresh.columns,
        old_log_probs=apart(),
        ref_log_probs=apart(),
        teacher_log_probs=apart(),
        entropy=scores["lm", "fsdp"]["entropy"].astype(np.float32),
        values=(scores["value", "fsdp"]["values"] + GAP * rng.normal(size=len(mask))).astype(np.float32),
    )
    return replace(fresh, batch=replace(batch, rollout_log_probs=np.where(mask, apart(), 0)), columns=columns)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_it_trains_like_fsdp(name, place, trial, tmp_path):
    entry = ALGORITHMS[name]
    (case, *_) = Subject(entry, REGISTRY, tmp_path / "files", (entry,)).cases
    # Once unchanged, and once with every term that it can have.
    for dress in dressed(case):
        for role, objective in dress.objectives(everything=False):
            case = f"{name}, {dress.setting}, {role}"
            credited = dress.credited(trial, role=role)
            training = TrainingBatch(batch=credited.batch, columns=credited.columns)
            split = ((0, 3, 4), (), (1, 2, 5, 6), (7, 8, 9, 10))
            expected, got = (
                one_step(backend, place, "value" if role == "critic" else "lm", training.micros(split), objective)
                for backend in BACKENDS
            )
            assert_same_step(case, got, expected)


def one_step(name, place, head, micros, objective):
    with opened(built(name), place, head=head) as one:
        before = one.weights()
        report = one.backend.train_step(micros, objective)
        after = one.weights()
        return report, {name: tensor - after[name] for name, tensor in before.items()}


def assert_same_step(case, got, expected):
    (report, gradients), (of_fsdp, expected_gradients) = got, expected
    assert not report.skipped
    assert not of_fsdp.skipped
    assert dict(report.sums) == pytest.approx(dict(of_fsdp.sums), rel=1e-4, abs=1e-5), case
    assert report.grad_norm == pytest.approx(of_fsdp.grad_norm, rel=1e-4), case
    assert gradients.keys() == expected_gradients.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected_gradients.values())
    assert scale > 1e-4, f"{case}: nothing is trained"
    for name, tensor in expected_gradients.items():
        apart = float((gradients[name] - tensor).abs().max())
        assert apart <= FLOAT32 * max(scale, 1.0), (
            f"{case}: the gradient of {name} is off by {apart:.3g} of {scale:.3g}"
        )
    assert torch.isfinite(torch.tensor(report.grad_norm))
