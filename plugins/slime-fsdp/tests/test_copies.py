"""Frozen copies: scored with the config of their folders, and refreshed."""

import json
import shutil

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3VLConfig

from slime_core.errors import ModelError
from slime_fsdp.architecture import differences


@pytest.mark.bits
def test_copies(folders, start, pack, samples, sequence_policy):
    backend = start(folders("qwen3"), frozen_models={"reference": folders("qwen3"), "teacher": folders("llama")})
    micro = pack(samples)

    def log_probs(name):
        return backend.forward_only([micro], weights=name)[0].log_probs

    first, teacher = log_probs("reference"), log_probs("teacher")
    np.testing.assert_array_equal(first, log_probs("actor"))
    assert np.abs(first - teacher).max() > 0.1
    backend.train_step([micro], sequence_policy())
    np.testing.assert_array_equal(first, log_probs("reference"))
    assert np.abs(first - log_probs("actor")).max() > 1e-3
    backend.update_frozen_model("reference")
    np.testing.assert_array_equal(log_probs("reference"), log_probs("actor"))
    np.testing.assert_array_equal(log_probs("teacher"), teacher)
    with pytest.raises(ModelError, match="another architecture"):
        backend.update_frozen_model("teacher")
    with pytest.raises(ModelError, match="close match: reference"):
        log_probs("referense")


def with_config(folder, target, **change):
    """Returns a folder with the same weights and a changed config.json."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return target


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e2}}, "rope_parameters"),
        ("qwen3", {"rms_norm_eps": 1e-2}, "rms_norm_eps"),
        ("mistral", {"sliding_window": 3}, "sliding_window"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_a_copy_of_another_architecture_is_not_refreshed(
    family, change, expected, folders, start, pack, samples, sequence_policy, tmp_path
):
    """The weights would fit, but give other log-probs than in the trained model."""
    micro = pack(samples)
    other = with_config(folders(family), tmp_path / "other", **change)
    backend = start(folders(family), frozen_models={"reference": other, "same": folders(family)})
    before = backend.forward_only([micro], weights="reference")[0].log_probs
    assert not np.array_equal(before, backend.forward_only([micro])[0].log_probs)
    backend.train_step([micro], sequence_policy())
    with pytest.raises(ModelError, match=rf"{other} has another architecture than .* \({expected}\), so"):
        backend.update_frozen_model("reference")
    np.testing.assert_array_equal(backend.forward_only([micro], weights="reference")[0].log_probs, before)
    backend.update_frozen_model("same")
    backend.save(tmp_path)
    resumed = start(folders(family), frozen_models={"reference": other, "same": other})
    with pytest.raises(ModelError, match=rf'weights "same": .* \({expected}\), so'):
        resumed.load(tmp_path)


def test_a_copy_with_an_equivalent_config_is_refreshed(folders, start, pack, samples, sequence_policy, tmp_path):
    change = {"eos_token_id": 3, "max_position_embeddings": 128, "initializer_range": 0.5, "dtype": "float16"}
    other = with_config(folders("qwen3"), tmp_path / "other", **change)
    backend = start(folders("qwen3"), frozen_models={"reference": other})
    backend.train_step([pack(samples)], sequence_policy())
    backend.update_frozen_model("reference")
    found, expected = (
        backend.forward_only([pack(samples)], weights=name)[0].log_probs for name in ("reference", "actor")
    )
    np.testing.assert_array_equal(found, expected)


def test_the_number_of_positions_matters_if_it_scales_rotations():
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    one, other = (Qwen3Config(max_position_embeddings=number) for number in (64, 128))
    assert differences(one, other) == []
    one, other = (Qwen3Config(max_position_embeddings=number, rope_parameters=scaled) for number in (64, 128))
    assert differences(one, other) == ["max_position_embeddings"]
    one, other = (Qwen3VLConfig(text_config={"rms_norm_eps": eps}) for eps in (1e-6, 1e-5))
    assert differences(one, other) == ["text_config.rms_norm_eps"]
