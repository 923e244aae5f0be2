"""Frozen copies: scored as their folders say, and brought up to date."""

import json
import shutil

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3VLConfig

from slime_core.errors import ModelError
from slime_fsdp.architecture import differences


@pytest.mark.bits
def test_copies(folders, start, pack, samples, sequence_policy):
    backend = start(folders("qwen3"), copies={"reference": folders("qwen3"), "teacher": folders("llama")})
    micro = pack(samples)

    def log_probs(name):
        return backend.score([micro], weights=name)[0].log_probs

    first, teacher = log_probs("reference"), log_probs("teacher")
    np.testing.assert_array_equal(first, log_probs("actor"))
    assert np.abs(first - teacher).max() > 0.1
    backend.train_step([micro], sequence_policy())
    np.testing.assert_array_equal(first, log_probs("reference"))
    assert np.abs(first - log_probs("actor")).max() > 1e-3
    backend.refresh_copy("reference")
    np.testing.assert_array_equal(log_probs("reference"), log_probs("actor"))
    np.testing.assert_array_equal(log_probs("teacher"), teacher)
    with pytest.raises(ModelError, match="another architecture"):
        backend.refresh_copy("teacher")
    with pytest.raises(ModelError, match="close match: reference"):
        log_probs("referense")


def with_config(folder, target, **change):
    """The same weights."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return target


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e2}}, "rope_parameters"),
        ("qwen3", {"rms_norm_eps": 1e-2}, "rms_norm_eps"),
        ("mistral", {"sliding_window": 3}, "sliding_window"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_a_copy_that_computes_otherwise_takes_no_trained_weights(
    family, change, told, folders, start, pack, samples, sequence_policy, tmp_path
):
    """They would fit, and score otherwise than they do where they are trained."""
    micro = pack(samples)
    other = with_config(folders(family), tmp_path / "other", **change)
    backend = start(folders(family), copies={"reference": other, "same": folders(family)})
    before = backend.score([micro], weights="reference")[0].log_probs
    assert not np.array_equal(before, backend.score([micro])[0].log_probs)
    backend.train_step([micro], sequence_policy())
    with pytest.raises(ModelError, match=rf"{other} has another architecture than .* \({told}\), so"):
        backend.refresh_copy("reference")
    np.testing.assert_array_equal(backend.score([micro], weights="reference")[0].log_probs, before)
    backend.refresh_copy("same")
    backend.save(tmp_path)
    resumed = start(folders(family), copies={"reference": other, "same": other})
    with pytest.raises(ModelError, match=rf'weights "same": .* \({told}\), so'):
        resumed.load(tmp_path)


def test_a_copy_whose_config_says_the_same_in_other_words_is_refreshed(
    folders, start, pack, samples, sequence_policy, tmp_path
):
    change = {"eos_token_id": 3, "max_position_embeddings": 128, "initializer_range": 0.5, "dtype": "float16"}
    other = with_config(folders("qwen3"), tmp_path / "other", **change)
    backend = start(folders("qwen3"), copies={"reference": other})
    backend.train_step([pack(samples)], sequence_policy())
    backend.refresh_copy("reference")
    found, wanted = (backend.score([pack(samples)], weights=name)[0].log_probs for name in ("reference", "actor"))
    np.testing.assert_array_equal(found, wanted)


def test_how_many_positions_there_are_counts_where_rotations_are_scaled_by_it():
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    one, other = (Qwen3Config(max_position_embeddings=number) for number in (64, 128))
    assert differences(one, other) == []
    one, other = (Qwen3Config(max_position_embeddings=number, rope_parameters=scaled) for number in (64, 128))
    assert differences(one, other) == ["max_position_embeddings"]
    one, other = (Qwen3VLConfig(text_config={"rms_norm_eps": eps}) for eps in (1e-6, 1e-5))
    assert differences(one, other) == ["text_config.rms_norm_eps"]
