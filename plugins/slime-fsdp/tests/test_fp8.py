"""Products in FP8, against matrices rounded by hand; refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from slime_core.errors import ConfigError
from slime_fsdp.plugin import Fsdp, FsdpConfig

HALF = {"precision": "bfloat16"}
SGD = {"optimizer": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
LARGEST = 448.0
"""Of float8_e4m3fn."""


@pytest.fixture
def begin(folders, start):
    """Backends that are closed with the test: lower precision wants a process group."""
    begun = []

    def begin(options, family="qwen3", optimizer=None):
        begun.append(start(folders(family), options, optimizer))
        return begun[-1]

    yield begin
    for backend in reversed(begun):
        backend.close()


def rounded(rows):
    """Each row to FP8, by the largest power of two that keeps all its numbers there."""
    scale = 2 ** (LARGEST / rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)).log2().floor()
    return (rows * scale).to(torch.float8_e4m3fn).to(rows.dtype) / scale


def rounded_linear(module, hidden):
    return F.linear(rounded(hidden), rounded(module.weight))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scores_are_those_of_matrices_rounded_by_hand(family, recipe, begin, oracle, pack, samples):
    found = begin(HALF | {"fp8_recipe": recipe}, family).score([pack(samples)])[0].log_probs
    exact = oracle(family)
    with torch.no_grad():
        plain = torch.cat(exact(samples)[0]).numpy()
        for name, module in exact.model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                module.forward = partial(rounded_linear, module)
        wanted = torch.cat(exact(samples)[0]).numpy()
    # bfloat16, in which everything else is computed, moves numbers over the edges of FP8.
    assert np.corrcoef(found - plain, wanted - plain)[0, 1] > 0.6


def test_scores_do_not_depend_on_packing(begin, pack, samples):
    backend = begin(HALF | {"fp8_recipe": "rowwise"})
    together = backend.score([pack(samples)])[0].log_probs
    alone = np.concatenate([scores.log_probs for scores in backend.score([pack([sample]) for sample in samples])])
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-2)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_a_step_goes_where_float64_goes(recipe, folders, begin, oracle, pack, samples, sequence_policy, weights_of):
    """And what is exported is what lies in the folder, until a step has moved it."""
    backend = begin(HALF | {"fp8_recipe": recipe, "gradient_checkpointing": True}, optimizer=SGD)
    before = weights_of(backend)
    assert before.keys() == load_file(folders("qwen3") / "model.safetensors").keys()
    for name, tensor in load_file(folders("qwen3") / "model.safetensors").items():
        assert torch.equal(before[name], tensor.to(torch.bfloat16))
    report = backend.train_step([pack(samples[:3]), pack([]), pack(samples[3:])], sequence_policy())
    gradients = oracle("qwen3").gradients(samples)
    assert report.grad_norm == pytest.approx(float(torch.cat([g.ravel() for g in gradients.values()]).norm()), rel=0.1)
    for name, after in weights_of(backend).items():
        step, wanted = (before[name].double() - after.double()).ravel(), gradients[name].ravel()
        assert torch.cosine_similarity(step, wanted, dim=0) > 0.9, name


def test_without_bfloat16_it_is_refused(folders, start):
    with pytest.raises(ConfigError, match='on the CPU it needs precision = "bfloat16" too'):
        start(folders("qwen3"), {"fp8_recipe": "rowwise"})


def test_what_does_not_go_together_is_said(monkeypatch):
    def problems(**options):
        config = FsdpConfig(fp8_recipe="rowwise", **options)
        return Fsdp.problems(config, 1, {"model_type": "qwen3"}), Fsdp.true_on_policy_problems(config)

    assert problems() == ([], ['fp8_recipe = "rowwise" rounds in its own way; leave it out'])
    ((problem,), _) = problems(precision="float32")
    assert 'backend.fp8_recipe = "rowwise"' in problem
    assert 'precision = "bfloat16"' in problem
    ((problem,), _) = problems(lora_rank=4)
    assert "adapters on a base in FP8" in problem
    monkeypatch.setattr("slime_fsdp.plugin.find_spec", lambda name: None)
    ((problem,), _) = problems()
    assert problem.endswith("needs torchao, which is not installed: pip install slime-fsdp[fp8].")
