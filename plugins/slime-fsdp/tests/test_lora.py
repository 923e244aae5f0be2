"""LoRA adapters against peft and transformers in float64: gradients, merging, folders, copies, resume."""

import json
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from slime_core.errors import CheckpointError, ModelError
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp

ADAM = {"lr": 0.01, "lr_warmup_iters": 1, "lr_decay_style": "cosine", "min_lr": 0.001}
LORA = {"lora_rank": 3, "lora_alpha": 5}
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def log_probs(pack, samples):
    return lambda backend, **options: backend.forward_only([pack(samples)], **options)[0].log_probs


def adapter_of(backend, folder):
    backend.save_hf(folder)
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def file_names(gradients):
    return {name.replace(".default.", "."): gradient for name, gradient in gradients.items()}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("llama", {"linear": "torch"}),
        ("qwen3_moe", {}),
        ("qwen3", {"gradient_checkpointing": True, "log_probs_chunk_size": 3}),
    ],
)
def test_gradients_equal_float64_peft(
    family, options, folders, adapters, start, pack, samples, sequence_policy, sgd, oracle, tmp_path
):
    backend = start(folders(family), {"lora_adapter_path": str(adapters(family))} | options, sgd)
    before = adapter_of(backend, tmp_path / "before")
    report = backend.train_step([pack(samples[:3]), pack([]), pack(samples[3:])], sequence_policy())
    after = adapter_of(backend, tmp_path / "after")
    expected = oracle(family, adapters(family))
    required = file_names({name: g for name, g in expected.gradients(samples).items() if g is not None})
    assert after.keys() == required.keys()
    assert any(".lora_A." in name for name in required)
    for name, gradient in required.items():
        assert gradient.norm() > 1e-4
        found = before[name].double() - after[name].double()
        assert (found - gradient).norm() < 3e-4 * gradient.norm(), name
    norm = torch.stack([gradient.norm() for gradient in required.values()]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert report.sums["loss"] == pytest.approx(expected.loss(samples).item(), rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_export_is_what_peft_merges(family, folders, start, train, weights_of, log_probs, samples, oracle, tmp_path):
    backend = start(folders(family), LORA, ADAM)
    train(backend, 3)
    exported = weights_of(backend)
    adapter = adapter_of(backend, tmp_path)
    assert all(tensor.abs().max() > 1e-3 and tensor.dtype == torch.float32 for tensor in adapter.values())
    assert {name.split(".")[-3] for name in adapter} <= LINEAR

    base = AutoModelForCausalLM.from_pretrained(folders(family))
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    required = load_file(tmp_path / "merged" / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == saved.keys() == required.keys()
    for name, weight in required.items():
        torch.testing.assert_close(exported[name], weight, rtol=1e-6, atol=1e-7)
        assert torch.equal(exported[name], saved[name])

    # transformers on the merged model, and peft on base and adapter, give the log-probs of the trained model.
    for model in (oracle(tmp_path), oracle(family, tmp_path / "adapter")):
        scored = torch.cat(model(samples)[0]).detach().numpy()
        np.testing.assert_allclose(log_probs(backend), scored, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pattern", [{}, {"q_proj": 5}])
def test_the_exported_adapter_is_what_peft_reads(pattern, folders, start, train, log_probs, samples, oracle, tmp_path):
    """Tensors and config, as transports write them; the rank is known without reading the model."""
    config = LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj", "up_proj"], rank_pattern=pattern, use_rslora=True)
    base = AutoModelForCausalLM.from_pretrained(folders("qwen3"))
    get_peft_model(base, config).save_pretrained(tmp_path / "first")
    options = {"lora_adapter_path": str(tmp_path / "first")}
    backend = start(folders("qwen3"), options, ADAM)
    train(backend, 2)
    tensors = {name: tensor for layer in backend.export_adapter() for name, tensor in layer.items()}
    (tmp_path / "sent").mkdir()
    save_file(tensors, tmp_path / "sent" / "adapter_model.safetensors")
    (tmp_path / "sent" / "adapter_config.json").write_text(json.dumps(backend.adapter_config()))
    scored = torch.cat(oracle("qwen3", tmp_path / "sent")(samples)[0]).detach().numpy()
    np.testing.assert_allclose(log_probs(backend), scored, rtol=1e-5, atol=1e-5)
    assert max(min(tensor.shape) for tensor in tensors.values()) == Fsdp.adapter_rank(FsdpConfig(**options))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_ranks_of_adapters():
    assert Fsdp.adapter_rank(FsdpConfig()) == 0
    assert Fsdp.adapter_rank(FsdpConfig(lora_rank=7)) == 7
    with pytest.raises(ModelError, match=r"lora_adapter_path: none/adapter_config.json cannot be read: FileNotFound"):
        Fsdp.adapter_rank(FsdpConfig(lora_adapter_path="none"))


def test_adapters_whose_product_is_not_finite_are_reported(folders, start, train, weights_of):
    """The product is what engines get."""
    backend = start(folders("qwen3"), {"lora_rank": 2})
    assert train(backend, 1)[0].nonfinite is None
    a, b = (
        next(p for name, p in backend._ready.model.model.named_parameters() if f"q_proj.lora_{which}" in name)
        for which in "AB"
    )
    with torch.no_grad():
        a.fill_(1e20)
        b.fill_(1e20)
    assert weights_of(backend)["model.layers.0.self_attn.q_proj.weight"].isinf().any()
    assert re.fullmatch(
        r"weight model\.layers\.0\.self_attn\.q_proj\.lora_A\S* has values up to 1e\+20, which its product with the other "
        "adapter weight cannot hold",
        backend._nonfinite(),
    )


def test_the_base_does_not_drift(folders, start, train, weights_of, log_probs):
    backend = start(folders("llama"), LORA, ADAM, frozen_models={"reference": folders("llama")})
    original = load_file(folders("llama") / "model.safetensors")
    fresh = weights_of(backend)
    plain = log_probs(start(folders("llama")))
    assert all(torch.equal(fresh[name], original[name]) for name in original)
    np.testing.assert_array_equal(log_probs(backend), plain)
    for _ in range(2):
        train(backend, 1)
        weights_of(backend)
        np.testing.assert_array_equal(log_probs(backend, weights="reference"), plain)
    assert np.abs(log_probs(backend) - plain).max() > 1e-3
    held = backend._ready.model.model.state_dict()
    for name, weight in original.items():
        inside = name if name in held else name.replace(".weight", ".base_layer.weight")
        assert torch.equal(held[inside], weight), name
    exported = weights_of(backend)
    changed = {name.split(".")[-2] for name in original if not torch.equal(exported[name], original[name])}
    assert changed == LINEAR
    # Tensors that an engine requires once.
    assert backend.frozen_tensors() == {name for name in exported if name.split(".")[-2] not in LINEAR}


def test_only_adapters_have_optimizer_state(folders, start, train, tmp_path):
    backend = start(folders("qwen3"), LORA | {"target_modules": ("q_proj", "v_proj")}, ADAM)
    train(backend, 1)
    backend.save(tmp_path)
    names = json.loads((tmp_path / "fsdp.json").read_text())["shapes"]
    assert len(names) == 2 * 2 * 2 * 4
    assert all(".lora_" in name and ("q_proj" in name or "v_proj" in name) for name in names)
    assert "exp_avg" in " ".join(names)


@pytest.mark.bits
@pytest.mark.parametrize("own_folder", [False, True])
def test_copies_are_frozen_and_refreshed(own_folder, folders, start, train, log_probs, tmp_path):
    reference = folders("qwen3")
    if own_folder:
        reference = tmp_path / "reference"
        start(folders("qwen3")).save_hf(reference)
    backend = start(folders("qwen3"), LORA, ADAM, frozen_models={"reference": reference})
    assert len(backend._ready.frozen_models) == own_folder
    base = log_probs(backend)
    train(backend, 2)
    trained = log_probs(backend)
    np.testing.assert_array_equal(log_probs(backend, weights="reference"), base)
    np.testing.assert_array_equal(log_probs(backend), trained)
    backend.update_frozen_model("reference")
    refreshed = log_probs(backend, weights="reference")
    np.testing.assert_allclose(refreshed, trained, rtol=1e-5, atol=1e-5)
    assert np.abs(refreshed - base).max() > 1e-3
    train(backend, 2)
    np.testing.assert_array_equal(log_probs(backend, weights="reference"), refreshed)
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")
    resumed = start(folders("qwen3"), LORA, ADAM, frozen_models={"reference": reference})
    resumed.load(tmp_path / "saved")
    np.testing.assert_array_equal(log_probs(resumed, weights="reference"), refreshed)
    np.testing.assert_array_equal(log_probs(resumed), log_probs(backend))
    with pytest.raises(ModelError, match="reference"):
        backend.update_frozen_model("referense")


@pytest.mark.bits
def test_resume_gives_the_same_bits(folders, start, train, weights_of, tmp_path):
    straight = start(folders("qwen3"), LORA, ADAM)
    train(straight, 2)
    straight.save(tmp_path)
    middle = weights_of(straight)
    reports = train(straight, 3, first=2)
    resumed = start(folders("qwen3"), LORA, ADAM, seed=9)
    resumed.load(tmp_path)
    assert all(torch.equal(weight, middle[name]) for name, weight in weights_of(resumed).items())
    again = train(resumed, 3, first=2)
    required = weights_of(straight)
    assert all(torch.equal(weight, required[name]) for name, weight in weights_of(resumed).items())
    assert not all(torch.equal(weight, middle[name]) for name, weight in required.items())
    assert [report.sums for report in again] == [report.sums for report in reports]
    for options in ({}, {"lora_rank": 4}):
        with pytest.raises(CheckpointError, match="another model"):
            start(folders("qwen3"), options, ADAM).load(tmp_path)


def test_the_seed_decides_the_initial_adapters(folders, start, tmp_path):
    state = torch.get_rng_state()
    one, same, other = (
        adapter_of(start(folders("qwen3"), LORA, seed=seed), tmp_path / str(i)) for i, seed in enumerate((5, 5, 6))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == (".lora_B." in name) for name in one)
    plain = start(folders("qwen3"))
    after_plain = torch.get_rng_state()
    torch.set_rng_state(state)
    start(folders("qwen3"), LORA)
    assert torch.equal(torch.get_rng_state(), after_plain)
    plain.close()


@pytest.mark.bits
def test_an_adapter_continues_where_it_was_saved(folders, adapters, start, log_probs, samples, oracle, train, tmp_path):
    frozen_models = {"reference": folders("qwen3")}
    backend = start(folders("qwen3"), {"lora_adapter_path": str(adapters("qwen3"))}, frozen_models=frozen_models)
    base = log_probs(start(folders("qwen3")))
    np.testing.assert_array_equal(log_probs(backend, weights="reference"), base)
    required = torch.cat(oracle("qwen3", adapters("qwen3"))(samples)[0]).detach().numpy()
    np.testing.assert_allclose(log_probs(backend), required, rtol=1e-5, atol=1e-5)
    train(backend, 1)
    backend.save_hf(tmp_path)
    again = start(folders("qwen3"), {"lora_adapter_path": str(tmp_path / "adapter")})
    np.testing.assert_array_equal(log_probs(again), log_probs(backend))


@pytest.mark.bits
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_critic_trains_all_of_its_head(family, folders, start, pack, samples, sequence_policy, tmp_path):
    backend = start(folders(family), LORA, ADAM, head="value")
    first = backend.forward_only([pack(samples)])[0].values
    np.testing.assert_array_equal(first, start(folders(family), head="value").forward_only([pack(samples)])[0].values)
    for _ in range(3):
        backend.train_step([pack(samples)], sequence_policy(reads_values=True))
    values = backend.forward_only([pack(samples)])[0].values
    assert np.abs(values - first).max() > 1e-3
    adapter = adapter_of(backend, tmp_path / "critic")
    assert "base_model.model.score.weight" in adapter

    def classifier(folder):
        return AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)

    merged = classifier(tmp_path / "critic")
    both = PeftModel.from_pretrained(classifier(folders(family)), tmp_path / "critic" / "adapter").double()
    for model in (merged.eval(), both.eval()):
        rows = [model(input_ids=s.tokens[None], use_cache=False).logits[0, s.prompt - 1 : -1, 0] for s in samples]
        np.testing.assert_allclose(values, torch.cat(rows).detach().numpy(), rtol=1e-5, atol=1e-5)
    options = {"lora_adapter_path": str(tmp_path / "critic" / "adapter")}
    again = start(folders(family), options, head="value")
    np.testing.assert_array_equal(again.forward_only([pack(samples)])[0].values, values)
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")
    resumed = start(folders(family), LORA, ADAM, head="value", seed=9)
    resumed.load(tmp_path / "saved")
    np.testing.assert_array_equal(resumed.forward_only([pack(samples)])[0].values, values)


def test_the_base_is_kept_in_the_precision_of_its_files(folders, start, train, weights_of, log_probs, tmp_path):
    """Adapters are float32 over a bfloat16 base; a float32 base is not rounded, since it is saved again."""
    half = AutoModelForCausalLM.from_pretrained(folders("qwen3"), dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    for source, dtype in ((tmp_path / "half", torch.bfloat16), (folders("qwen3"), torch.float32)):
        original = load_file(source / "model.safetensors")
        backend = start(source, LORA | {"precision": "bfloat16"}, ADAM, frozen_models={"reference": source})
        try:
            base = log_probs(backend)
            parameters = dict(backend._ready.model.model.named_parameters())
            assert {p.dtype for p in parameters.values() if p.requires_grad} == {torch.float32}
            assert {p.dtype for p in parameters.values() if not p.requires_grad} == {dtype}
            train(backend, 2)
            assert np.abs(log_probs(backend) - base).max() > 1e-2
            np.testing.assert_array_equal(log_probs(backend, weights="reference"), base)
            assert {weight.dtype for weight in weights_of(backend).values()} == {torch.bfloat16}
            backend.save_hf(tmp_path / f"out_{dtype}")
        finally:
            backend.close()
        saved = load_file(tmp_path / f"out_{dtype}" / "model.safetensors")
        assert {weight.dtype for weight in saved.values()} == {dtype}
        assert all(torch.equal(saved[name], original[name]) for name in original if "norm" in name or "embed" in name)


def changed(folder, target, weights=None, **config):
    target.mkdir()
    adapter_config = json.loads((folder / "adapter_config.json").read_text()) | config
    (target / "adapter_config.json").write_text(json.dumps(adapter_config))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(tensors | (weights or {}), target / "adapter_model.safetensors")
    return str(target)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_what_cannot_be_adapted_is_refused(folders, adapters, start, tmp_path):
    def refused(text, **options):
        with pytest.raises(ModelError, match=text):
            start(folders("qwen3"), options)

    refused("not in a decoder layer", lora_rank=2, target_modules=("lm_head",))
    refused("not in a decoder layer", lora_rank=2, target_modules=("q_proj", "embed_tokens"))
    refused("q_prog", lora_rank=2, target_modules=("q_prog",))
    source = adapters("qwen3")
    refused("no adapter_config.json", lora_adapter_path=str(tmp_path))
    refused("use_dora = True", lora_adapter_path=changed(source, tmp_path / "dora", use_dora=True))
    refused("pissa", lora_adapter_path=changed(source, tmp_path / "pissa", init_lora_weights="pissa"))
    refused("peft_type", lora_adapter_path=changed(source, tmp_path / "ia3", peft_type="IA3"))
    refused("do not fit", lora_adapter_path=changed(source, tmp_path / "rank", r=2))
    extra = {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    refused("lm_head", lora_adapter_path=changed(source, tmp_path / "extra", extra))
    bare = tmp_path / "bare"
    changed(source, bare)
    (bare / "adapter_model.safetensors").unlink()
    refused("no adapter_model.safetensors", lora_adapter_path=str(bare))


def test_options_that_contradict_each_other(monkeypatch):
    def problems(**options):
        return Fsdp.problems(FsdpConfig(**options), 1, {"model_type": "qwen3"})

    assert problems(lora_rank=4, lora_alpha=8, target_modules=("q_proj",)) == []
    assert "lora_rank" in problems(lora_alpha=8)[0]
    assert "target_modules" in problems(lora_rank=4, freeze_params_name_list=("embed",))[0]
    assert len(problems(lora_adapter_path="/adapter", lora_rank=4, lora_alpha=8)) == 2
    monkeypatch.setattr("slime_fsdp.config.find_spec", lambda name: None)
    assert problems() == []
    assert "pip install slime-fsdp[lora]" in problems(lora_rank=4)[0]
    assert "pip install slime-fsdp[lora]" in problems(lora_adapter_path="/adapter")[0]
