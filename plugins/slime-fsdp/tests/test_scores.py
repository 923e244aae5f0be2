"""Log-probs and entropies against transformers' own padded forward in float64."""

import json
import shutil

import numpy as np
import pytest
import torch


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "mistral", "qwen3_moe", "qwen3_next", "qwen3_5_text", "minimax_m2"]
)
def test_scores_equal_a_padded_float64_forward(family, folders, start, pack, samples, oracle):
    backend = start(folders(family))
    (scores,) = backend.forward_only([pack(samples)], entropy=True)
    with torch.no_grad():
        log_probs, entropies = oracle(family)(samples)
    assert scores.log_probs.dtype == np.float32
    assert scores.rows is None
    np.testing.assert_allclose(scores.log_probs, torch.cat(log_probs).numpy(), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, torch.cat(entropies).numpy(), rtol=2e-5, atol=2e-5)
    assert np.ptp(scores.log_probs) > 0.5


def test_a_released_config_sets_how_many_features_are_rotated(folders, start, pack, samples, oracle, tmp_path):
    """transformers 5.12 does not read this key."""
    folder = shutil.copytree(folders("minimax_m2"), tmp_path / "released")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    assert raw["rope_parameters"].pop("partial_rotary_factor") == 0.5
    file.write_text(json.dumps(raw | {"rotary_dim": 4}))
    (scores,) = start(folder).forward_only([pack(samples)])
    with torch.no_grad():
        log_probs, _ = oracle("minimax_m2")(samples)
    np.testing.assert_allclose(scores.log_probs, torch.cat(log_probs).numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options", [{"log_probs_chunk_size": 3}, {"log_probs_chunk_size": -1}, {"attn_implementation": "sdpa"}]
)
def test_options_do_not_change_scores(options, folders, start, pack, samples):
    plain = start(folders("qwen3")).forward_only([pack(samples)], entropy=True)[0]
    other = start(folders("qwen3"), options).forward_only([pack(samples)], entropy=True)[0]
    np.testing.assert_allclose(other.log_probs, plain.log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other.entropy, plain.entropy, rtol=1e-5, atol=1e-5)


def test_scores_do_not_depend_on_packing(folders, start, pack, samples):
    backend = start(folders("mistral"))
    together = backend.forward_only([pack(samples)])[0].log_probs
    alone = np.concatenate([s.log_probs for s in backend.forward_only([pack([sample]) for sample in samples])])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)


def test_entropy_is_computed_only_on_request(folders, start, pack, samples):
    assert start(folders("qwen3")).forward_only([pack(samples)])[0].entropy is None


def test_an_empty_micro_batch_scores_nothing(folders, start, pack):
    assert start(folders("qwen3")).forward_only([pack([])], entropy=True)[0].log_probs.shape == (0,)


def test_a_bfloat16_model_is_near_the_float32_one(folders, start, pack, samples):
    exact = start(folders("qwen3")).forward_only([pack(samples)])[0].log_probs
    backend = start(folders("qwen3"), {"precision": "bfloat16"})
    try:
        rough = backend.forward_only([pack(samples)])[0].log_probs
        assert {t.dtype for layer in backend.export_weights() for t in layer.values()} == {torch.bfloat16}
    finally:
        backend.close()
    assert 0 < np.abs(rough - exact).max() < 0.3
