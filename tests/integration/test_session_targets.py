"""Several targets at a position: log-probs, gradients and a step, beside transformers and peft in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import slime_core
from slime_core.errors import ConfigError, DataError
from slime_session import Datum, TrainingSession, target_batch

if TYPE_CHECKING:
    from conftest import TinyRun

LR, EPS = 0.01, 1.0
SHAPES = ((7, 3), (1, 1), (12, 5), (4, 1))
"""P and K of each datum."""


@pytest.fixture(scope="module")
def tiny(make_tiny: Callable[[Path], TinyRun], tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny(tmp_path_factory.mktemp("targets"))


@pytest.fixture
def opened(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingSession]:
    monkeypatch.chdir(tiny.folder)

    def open_(overrides: Mapping[str, Any]) -> TrainingSession:
        given = {"rollout.rollout_batch_size": 8, "train.clip_grad": 0.0, "name": "targets", **overrides}
        session = slime_core.open_session("run.toml", overrides=given, fresh=True)
        assert isinstance(session, TrainingSession)
        return session

    return open_


def cases() -> list[Datum]:
    """One position has the same target twice, one has weights of zero alone, and none has only next tokens."""
    draw = np.random.default_rng(4)
    found = []
    for length, count in SHAPES:
        targets = draw.integers(3, 14, (length, count))
        weights = draw.normal(size=(length, count)).astype(np.float32)
        targets[-1] = targets[-1, 0]
        if length > 1:
            weights[1] = 0.0
        found.append(
            Datum(
                tokens=draw.integers(3, 14, length),
                prompt_length=length,
                targets=targets,
                loss_weights=weights.ravel(),
            )
        )
    return found


def oracle(model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(P, K) log-probs of each datum, and the loss."""
    found, loss = [], torch.zeros((), dtype=torch.float64)
    for datum in cases():
        distribution = model(torch.tensor(np.asarray(datum.tokens))[None]).logits[0].double().log_softmax(-1)
        assert datum.targets is not None
        own = distribution.gather(1, torch.tensor(datum.targets))
        weights = torch.tensor(np.asarray(datum.loss_weights)).double().reshape(own.shape)
        loss = loss - (weights * own).sum()
        found.append(own.detach())
    return found, loss


def test_an_adapter_learns_from_several_targets(
    tiny: TinyRun, opened: Callable[..., TrainingSession], tmp_path: Path
) -> None:
    # Chunks of the head end inside the datums, and each micro-batch has two of them or more.
    options = {"backend.max_adapters": 2, "backend.log_probs_chunk_size": 5, "train.max_tokens_per_gpu": 90}
    with opened(options) as session:
        first = session.add_adapter("first", rank=4, seed=1)
        text = session.batch([Datum(tokens=[3, 9, 4, 7, 5], prompt_length=1, loss_weights=np.ones(4, np.float32))])
        first.forward_backward(text, loss="sft")
        first.optim_step(lr=0.05)
        before = first.save(tmp_path / "before", optimizer=False)
        adapter = session.load_adapter("second", before)
        batch = session.batch(cases())
        scored = adapter.forward(batch)
        gradients = adapter.forward_backward(batch, loss="sft")
        np.testing.assert_array_equal(gradients.log_probs, scored)
        # What follows has one target at a position again.
        again = adapter.forward(text)
        np.testing.assert_array_equal(again, first.forward(text))
        report = adapter.optim_step(lr=LR, betas=(0.0, 0.0), eps=EPS, weight_decay=0.0)
        after = adapter.save(tmp_path / "after", optimizer=False)

    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "base", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, before, is_trainable=True).double()
    log_probs, loss = oracle(model)
    np.testing.assert_allclose(scored, torch.cat([own.ravel() for own in log_probs]).numpy(), atol=2e-6)
    assert gradients.loss == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    norm = torch.stack([parameter.grad.norm() for parameter in trained.values()]).norm().item()
    assert norm > 0.1
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    moved = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny.folder / "base", dtype=torch.float64), after
    )
    found = dict(moved.double().named_parameters())
    for name, parameter in trained.items():
        expected = parameter.detach() - LR * parameter.grad / (parameter.grad.abs() + EPS)
        np.testing.assert_allclose(found[name].detach().numpy(), expected.detach().numpy(), atol=1e-6, err_msg=name)
        assert (expected - parameter.detach()).abs().max() > 1e-5


def test_all_weights_learn_from_several_targets(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    with opened({"backend.log_probs_chunk_size": 4}) as session:
        batch = session.batch(cases())
        gradients = session.forward_backward(batch, loss="sft")
        report = session.optim_step()
    model = AutoModelForCausalLM.from_pretrained(tiny.folder / "base", dtype=torch.float64)
    log_probs, loss = oracle(model)
    np.testing.assert_allclose(gradients.log_probs, torch.cat([own.ravel() for own in log_probs]).numpy(), atol=2e-6)
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_backend_with_one_target_at_a_position_is_named(
    opened: Callable[..., TrainingSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened({}) as session, monkeypatch.context() as patched:
        patched.setattr(target_batch, "PromptTargets", type("Other", (), {}))
        with pytest.raises(
            ConfigError, match=r'datums\[0\]\.targets: backend "fsdp" computes one target at a position'
        ):
            session.batch(cases())


def test_targets_that_do_not_fit_are_refused(opened: Callable[..., TrainingSession]) -> None:
    good = cases()[0]
    with opened({}) as session:
        for wrong, words in (
            ([good, Datum(tokens=[3, 4], prompt_length=1)], r"datums\[1\] has no targets, and others have"),
            ([Datum(tokens=[3, 4], prompt_length=1, targets=np.ones((2, 2), int))], r"shape \(2, 2\) for 2 tokens"),
            ([Datum(tokens=[3], prompt_length=1, targets=np.ones((1, 0), int))], r"shape \(1, 0\) for 1 tokens"),
            ([Datum(tokens=[3], prompt_length=1, targets=np.full((1, 2), 999))], r"datums\[0\]\.targets"),
        ):
            with pytest.raises((DataError, ConfigError), match=words):
                session.batch(wrong)
