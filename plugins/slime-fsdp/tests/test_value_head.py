"""A critic's values and gradients against transformers' own token classifier in float64."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from slime_core.contracts.backend import ObjectiveOutput


@dataclass(frozen=True)
class SquaredError:
    """Weighted squared error to the column that holds the advantages."""

    reads_values: bool = True
    needs_entropy: bool = False
    entropy_has_gradient: bool = False

    def __call__(self, micro, *, segments, log_probs=None, entropy=None, values=None):
        assert log_probs is None
        assert entropy is None
        loss = ((values - micro.columns.advantages).square() * micro.columns.loss_weight).sum()
        return ObjectiveOutput(loss=loss, sums={"loss": loss.detach()})


def classifier_of(backend, folder):
    backend.save_hf(folder)
    return AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()


def values_of(model, samples):
    rows = [model(input_ids=sample.tokens[None], use_cache=False).logits[0, :, 0] for sample in samples]
    return [row[s.prompt - 1 : len(s.tokens) - 1] for row, s in zip(rows, samples, strict=True)]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_a_step_follows_the_gradient_of_the_classifier(family, folders, start, pack, samples, sgd, tmp_path):
    backend = start(folders(family), None, sgd, head="value")
    model = classifier_of(backend, tmp_path / "before")
    loss = torch.zeros((), dtype=torch.float64)
    for sample, values in zip(samples, values_of(model, samples), strict=True):
        loss = loss + (sample.weight * (values - sample.advantage).square())[sample.mask].sum()
    loss.backward()
    report = backend.train_step([pack(samples[:3]), pack([]), pack(samples[3:])], SquaredError())
    assert report.sums["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: (p.detach() - p.grad).float() for name, p in model.named_parameters()}
    after = {name: p.float() for name, p in classifier_of(backend, tmp_path / "after").named_parameters()}
    assert after.keys() == expected.keys()
    scale = max(float(p.grad.abs().max()) for p in model.parameters())
    assert scale > 0.1
    for name, weight in expected.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=2e-5 * scale, msg=name)


def test_values_are_float32_whatever_the_model_computes_in(folders, start, pack, samples):
    exact = start(folders("qwen3"), head="value").forward_only([pack(samples)])[0].values
    backend = start(folders("qwen3"), {"precision": "bfloat16"}, head="value")
    try:
        rough = backend.forward_only([pack(samples)])[0].values
    finally:
        backend.close()
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - exact).max() < 0.3
    on_grid = torch.from_numpy(rough).bfloat16().float().numpy() == rough
    assert on_grid.mean() < 0.2


def test_an_empty_micro_batch_has_no_values(folders, start, pack):
    assert start(folders("qwen3"), head="value").forward_only([pack([])])[0].values.shape == (0,)


def test_a_new_value_head_causes_no_warning(folders, start, caplog, capfd):
    start(folders("qwen3"), head="value")
    assert "MISSING" not in caplog.text + capfd.readouterr().err
