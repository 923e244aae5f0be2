"""Export and load of weights: buckets, Hugging Face folders, value heads."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from slime_plugin_kit.tiny_model import with_longer_header


@pytest.fixture
def trained(folders, start, pack, samples, sequence_policy):
    def build(family, **setup):
        backend = start(folders(family), **setup)
        backend.train_step([pack(samples)], sequence_policy(reads_values=setup.get("head") == "value"))
        return backend

    return build


@pytest.mark.bits
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "qwen3_5_text", "minimax_m2"])
def test_export_and_save_hf_are_what_transformers_loads(
    family, trained, folders, weights_of, pack, samples, start, tmp_path
):
    backend = trained(family)
    exported = weights_of(backend)
    original = load_file(folders(family) / "model.safetensors")
    assert exported.keys() == original.keys()
    assert any(not torch.equal(exported[name], original[name]) for name in original)

    backend.save_hf(tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    # transformers alone, and this backend, read the same model back.
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        if name in exported:
            assert torch.equal(parameter, exported[name])
    again = start(tmp_path / "hf")
    np.testing.assert_array_equal(
        again.forward_only([pack(samples)])[0].log_probs, backend.forward_only([pack(samples)])[0].log_probs
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == json.loads((folders(family) / "config.json").read_text())["architectures"]
    assert (tmp_path / "hf" / "generation_config.json").is_file()


def test_tied_weights_are_exported_once(folders, start, weights_of):
    assert "lm_head.weight" not in weights_of(start(folders("qwen3")))
    assert "lm_head.weight" in weights_of(start(folders("llama")))


def test_save_hf_keeps_the_dtype_of_the_source(folders, start, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders("qwen3"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    start(tmp_path / "half").save_hf(tmp_path / "out")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "out"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_with_its_own_code_is_saved_with_it(folders, start, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = shutil.copytree(folders("qwen3"), tmp_path / "source")
    (source / "modeling_own.py").write_text(
        "from transformers import Qwen3ForCausalLM\n\n\nclass OwnForCausalLM(Qwen3ForCausalLM):\n    pass\n"
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}})
    )
    backend = start(source, trust_remote_code=True)
    backend.save_hf(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"


@pytest.mark.bits
def test_a_value_head_starts_small_is_trained_and_comes_back(trained, folders, start, pack, samples, tmp_path):
    fresh = start(folders("qwen3"), head="value")
    same = start(folders("qwen3"), head="value")
    (first,) = fresh.forward_only([pack(samples)])
    assert first.log_probs is None
    assert first.values.shape == (sum(sample.response for sample in samples),)
    np.testing.assert_array_equal(first.values, same.forward_only([pack(samples)])[0].values)
    assert not np.array_equal(
        first.values, start(folders("qwen3"), head="value", seed=6).forward_only([pack(samples)])[0].values
    )

    backend = trained("qwen3", head="value")
    values = backend.forward_only([pack(samples)])[0].values
    assert not np.array_equal(values, first.values)
    backend.save_hf(tmp_path / "critic")
    again = start(tmp_path / "critic", head="value")
    np.testing.assert_array_equal(again.forward_only([pack(samples)])[0].values, values)

    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", dtype=torch.float64).eval()
    expected = []
    with torch.no_grad():
        for sample in samples:
            row = model(input_ids=sample.tokens[None], use_cache=False).logits[0, :, 0]
            expected.append(row[sample.prompt - 1 : len(sample.tokens) - 1])
    np.testing.assert_allclose(values, torch.cat(expected).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.bits
@pytest.mark.parametrize("linear", ["onednn", "torch"])
def test_where_weights_begin_in_their_file_changes_no_value(linear, folders, start, pack, samples, tmp_path):
    """For many rows, and for few, which use other products."""
    start(folders("qwen3"), head="value").save_hf(tmp_path / "model")
    micros = [pack(samples), *(pack([sample]) for sample in samples)]

    def values(num_bytes):
        folder = with_longer_header(tmp_path / "model", tmp_path / f"{num_bytes} bytes", num_bytes)
        scored = start(folder, {"linear": linear}, head="value").forward_only(micros)
        return [part.values.tobytes() for part in scored]

    first, *others = (values(num_bytes) for num_bytes in (0, 4, 8, 12))
    assert all(other == first for other in others)
