"""Bridges: a model of each family, made by transformers, gives the same log-probs and gradients here, and is saved to the same
bits."""

import json
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, gradients_of, load_family, make_family
from safetensors.torch import load_file, save_file

from slime_core.errors import ConfigError, ModelError
from slime_megatron.bridges.bridge import choosers_of
from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_training import SPLITS, WHOLE, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

LOGITS = 1e-4


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model") / request.param, request.param)


def opened_one(folder, **kwargs):
    return opened(Megatron.build(Megatron.Config()), Place(model=folder), **kwargs)


def test_it_computes_the_same_as_transformers(family):
    training = TrainingBatch.make()
    model = load_family(family, torch.float64)
    with torch.no_grad():
        log_probs, entropy = training.by_transformers(model)
    with opened_one(family) as one:
        for split in (WHOLE, *SPLITS):
            got = one.scores(training, split, entropy=True)
            for name, expected in {"log_probs": log_probs, "entropy": entropy}.items():
                apart = abs(got[name] - expected.numpy()).max()
                assert apart <= LOGITS, f"{name} are off by {apart:.3g} nats"

        before = one.weights()
        one.backend.train_step(training.micros(SPLITS[0]), objective_of())
        after = one.weights()
    gradients = gradients_of(training, model, before.keys())
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    untrained = {name for name in before if name.endswith("e_score_correction_bias") or ".indexer." in name}
    assert gradients.keys() == before.keys() - untrained
    for name, gradient in gradients.items():
        apart = float((before[name] - after[name] - gradient).abs().max())
        assert apart <= 1e-4 * scale, f"the gradient of {name} is off by {apart:.3g}, where the largest is {scale:.3g}"


def test_it_is_saved_to_the_same_bits(family, tmp_path):
    with opened_one(family) as one:
        exported = one.weights()
        one.backend.save_hf(tmp_path / "saved")
    held = load_file(family / "model.safetensors")
    decoder = {name: tensor for name, tensor in held.items() if not name.startswith("model.visual.")}
    assert set(exported) == set(decoder)
    for name, tensor in decoder.items():
        assert torch.equal(exported[name], tensor), name
    saved, loaded = (load_family(folder).state_dict() for folder in (tmp_path / "saved", family))
    assert set(saved) == set(loaded)
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())


def test_what_is_saved_is_gathered_piece_by_piece(tmp_path, monkeypatch):
    """A layer with experts is not gathered as a whole, unlike in an export to engines."""
    from slime_megatron import weights

    folder = make_family(tmp_path / "model", "deepseek-v3")
    alive = weakref.WeakSet()
    wholes = weights.WeightTable._wholes

    def counted(table, entries, dtype):
        found = wholes(table, entries, dtype)
        alive.update(found.values())
        return found

    monkeypatch.setattr(weights.WeightTable, "_wholes", counted)
    # Smaller than any tensor, so that each is gathered alone.
    monkeypatch.setattr(weights, "JOINT_BYTES", 1)
    with opened_one(folder) as one:
        table = one.backend._trainer.table
        # In another dtype they are copies.
        most = max(len(alive) for _ in table.as_gathered(torch.float64))
        of_layers = max(len(alive) for _ in table.export(torch.float64, keep=True))
        names = [name for name, _ in table.as_gathered(None)]
        exported = list(one.weights())
    assert most <= 2
    assert of_layers > 16
    assert len(names) == len(set(names))
    assert set(names) == set(exported)


def test_positions_of_chosen_keys_may_be_embedded_in_neighbours(tmp_path, monkeypatch):
    """GLM-5 has them, without a key in its config. transformers 5.12 has to be patched."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as theirs

    folder, training = make_family(tmp_path / "model", "glm-5"), TrainingBatch.make()
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    del raw["indexer_rope_interleave"]
    file.write_text(json.dumps(raw))
    with torch.no_grad():
        halves, _ = training.by_transformers(load_family(folder, torch.float64))
        turn = theirs.apply_rotary_pos_emb_interleave
        monkeypatch.setattr(
            theirs, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim: turn(q, k, cos, sin, None, 2)
        )
        neighbours, _ = training.by_transformers(load_family(folder, torch.float64))
    assert float((halves - neighbours).abs().max()) > 0.01
    with opened_one(folder) as one:
        got = one.scores(training)["log_probs"]
    assert abs(got - neighbours.numpy()).max() <= LOGITS


def test_keys_chosen_on_another_stage_are_an_error(tmp_path):
    from slime_megatron.bridges.bridge import Architecture, Rotary
    from slime_megatron.layers import chooser_of

    architecture = Architecture(
        options={},
        vocab_size=1,
        max_length=1,
        tied=False,
        padding=None,
        rotary=Rotary(inv_freq=torch.ones(1)),
        choosers=choosers_of(["full", "shared", "full", "shared"]),
    )
    assert [chooser_of(architecture, layer, 0) for layer in range(4)] == [1, 1, 3, 3]
    assert chooser_of(architecture, 3, 2) == 3
    with pytest.raises(ConfigError, match=r"layer 1 uses the keys that layer 0 chooses.*start at layers 0, 2"):
        chooser_of(architecture, 1, 1)


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5-tied"])
def test_the_padding_token_is_not_trained(name, tmp_path):
    """transformers does not train it either, even if a model samples it; a tied head is trained."""
    family = make_family(tmp_path / name, name)
    plain = TrainingBatch.make()
    tokens = plain.batch.tokens.copy()
    tokens[::5] = 0
    training = replace(plain, batch=replace(plain.batch, tokens=tokens))
    gradients = training.gradients_by_transformers(load_family(family, torch.float64))
    with opened_one(family) as one:
        before = one.weights()
        one.backend.train_step(training.micros(SPLITS[0]), objective_of())
        after = one.weights()
    expected = gradients["model.embed_tokens.weight"]
    assert bool(expected[0].any()) == (name == "qwen2.5-tied")
    for weight in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        apart = float((before[weight] - after[weight] - gradients[weight]).abs().max())
        assert apart <= 1e-4 * max(1.0, float(gradients[weight].abs().max())), f"{weight} is off by {apart:.3g}"


@pytest.fixture
def folder(tmp_path):
    return make_family(tmp_path / "model", "qwen3")


def changed(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_missing_and_extra_weights_are_named(folder):
    def change(weights):
        del weights["model.layers.2.self_attn.q_norm.weight"]
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3, 3)

    changed(folder, change)
    with pytest.raises(
        ModelError, match=r"missing.*layers\.2\.self_attn\.q_norm\.weight.*no place.*layers\.9"
    ) as error:
        opened_one(folder).__enter__()
    assert str(folder) in str(error.value)


def test_weights_of_another_shape_are_named(folder):
    changed(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(33)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight \(is \(33,\), should be \(32,\)\)"):
        opened_one(folder).__enter__()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "full attention"),
        ({"model_type": "qwen9"}, "no bridge.*qwen3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
)
def test_what_is_not_computed_is_refused(folder, fields, expected):
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | fields
    raw.pop("layer_types", None)
    file.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=expected):
        opened_one(folder).__enter__()


def test_dense_layers_come_before_those_with_experts(tmp_path):
    folder = make_family(tmp_path / "model", "glm-4.7-flash")
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
    file.write_text(json.dumps(raw))
    with pytest.raises(
        ModelError, match=r"mlp_layer_types = \['sparse', 'dense', .*all dense layers have to come first"
    ):
        opened_one(folder).__enter__()


@pytest.mark.parametrize("shape", [{"vpp": 2}, {"sequence_parallel": True, "tp": 2}])
def test_roles_of_one_process_have_one_layout(shape, folder):
    from slime_megatron.layout import ParallelDims
    from slime_megatron.process import join

    with opened_one(folder), pytest.raises(ConfigError, match=r"role critic: .* another role .* another layout"):
        join(Place(model=folder).setup(role="critic"), ParallelDims(**shape))


def test_a_copy_of_another_architecture_is_refused(folder, tmp_path):
    other = make_family(tmp_path / "other", "qwen2.5")
    with pytest.raises(ModelError, match="another architecture"):
        opened_one(folder, frozen_models={"teacher": other}).__enter__()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
        ({"rms_norm_eps": 1e-3}, "layernorm_epsilon"),
    ],
)
def test_a_copy_with_another_config_is_refused(change, expected, folder, tmp_path):
    """Its weights would fit."""
    other = shutil.copytree(folder, tmp_path / "other")
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=rf"another architecture than the trained one \({expected}\)"):
        opened_one(folder, frozen_models={"teacher": other}).__enter__()


def test_layers_of_multi_token_prediction_are_saved_unchanged(tmp_path):
    """They are saved unchanged, not trained."""
    folder = make_family(tmp_path / "model", "glm-4.5")
    extra = "model.layers.4.eh_proj.weight"
    changed(folder, lambda weights: weights.update({extra: torch.arange(6.0).view(2, 3)}))
    with opened_one(folder) as one:
        assert extra not in one.weights()
        one.backend.save_hf(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[extra], torch.arange(6.0).view(2, 3))


def test_kimi_is_read_as_deepseek(tmp_path):
    folder, training = make_family(tmp_path / "model", "deepseek-v3"), TrainingBatch.make()
    with torch.no_grad():
        log_probs, _ = training.by_transformers(load_family(folder, torch.float64))
    expected = load_file(folder / "model.safetensors")
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.X"}}
    file.write_text(json.dumps(raw))
    (folder / "configuration.py").write_text("X = None\n")
    check_model(folder, training, expected, log_probs, saved=tmp_path / "saved")
    # Loading the folder runs the code that its config names.
    assert (tmp_path / "saved" / "configuration.py").read_text() == "X = None\n"


def check_model(folder, training, expected, log_probs, *, saved):
    """The backend exports the weights of `expected` and computes `log_probs`; what `save_hf` writes goes to `saved`."""
    with opened_one(folder) as one:
        exported = one.weights()
        got = one.scores(training)["log_probs"]
        one.backend.save_hf(saved)
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    assert abs(got - log_probs.numpy()).max() <= LOGITS


def test_mimo_is_read_as_qwen2(tmp_path):
    """transformers has no such family: its released config names code of its own, which is not run here."""
    folder, training = make_family(tmp_path / "model", "qwen2.5"), TrainingBatch.make()
    expected = load_file(folder / "model.safetensors")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    rotary = raw.pop("rope_parameters") | {"rope_theta": 640000}
    file.write_text(json.dumps(raw | {"rope_parameters": rotary}))
    with torch.no_grad():
        log_probs, _ = training.by_transformers(load_family(folder, torch.float64))
    extra = "model.mtp_layers.0.input_proj.weight"
    changed(folder, lambda weights: weights.update({extra: torch.ones(2, 3)}))
    released = {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1, "rope_theta": 640000}
    file.write_text(json.dumps(raw | released | {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}))
    check_model(folder, training, expected, log_probs, saved=tmp_path / "saved")
    assert extra in load_file(tmp_path / "saved/model.safetensors")


@pytest.mark.parametrize("name", ["minimax-m2", "qwen3.5"])
def test_released_configs(name, tmp_path):
    """MiniMax-M2's has the rotated features in a key that transformers 5.12 does not read. Of Qwen3.5's decoder the dtype is
    that of the folder, and whether embedding and head are tied is set outside of it."""
    folder, training = make_family(tmp_path / "model", name), TrainingBatch.make()
    with torch.no_grad():
        log_probs, _ = training.by_transformers(load_family(folder, torch.float64))
    held = load_file(folder / "model.safetensors")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    if name == "minimax-m2":
        assert raw["rope_parameters"].pop("partial_rotary_factor") == 0.5
        raw |= {"rotary_dim": 8, "use_qk_norm": True, "scoring_func": "sigmoid", "num_mtp_modules": 3}
    else:
        assert raw["tie_word_embeddings"]
        raw["text_config"] |= {"dtype": raw.pop("dtype"), "tie_word_embeddings": False, "attn_output_gate": True}
    file.write_text(json.dumps(raw))
    expected = {key: tensor for key, tensor in held.items() if not key.startswith("model.visual.")}
    check_model(folder, training, expected, log_probs, saved=tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == held.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in held.items())


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "minimax-m2",
            {"qk_norm_type": "per_head", "scoring_func": "softmax"},
            "scoring_func = softmax, qk_norm_type = per_head",
        ),
        ("minimax-m2", {"attn_type_list": [1, 0, 1, 1]}, r"attn_type_list = \[1, 0, 1, 1\]"),
        ("qwen3.5-moe-text", {"attn_output_gate": False}, "attn_output_gate = false"),
    ],
)
def test_what_transformers_does_not_compute_either_is_refused(name, fields, expected, tmp_path):
    folder = make_family(tmp_path / "model", name)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelError, match=expected):
        opened_one(folder).__enter__()


def test_a_copy_whose_folder_has_its_experts_in_another_form(tmp_path):
    """A released folder has all experts in one tensor, one that transformers saved has them one by one."""
    stacked = make_family(tmp_path / "stacked", "qwen3.5-moe")
    apart = make_family(tmp_path / "apart", "qwen3.5-moe", stacked=False)
    assert load_file(stacked / "model.safetensors").keys() != load_file(apart / "model.safetensors").keys()
    training = TrainingBatch.make()
    with opened_one(apart, frozen_models={"teacher": stacked}) as one:
        micros = training.micros(WHOLE)
        (own,), (copy,) = (one.backend.forward_only(micros, weights=name) for name in ("actor", "teacher"))
    assert (own.log_probs == copy.log_probs).all()


def test_a_critic_of_a_folder_with_a_vision_tower(tmp_path):
    folder = make_family(tmp_path / "model", "qwen3.5")
    with opened_one(folder, head="value") as critic:
        critic.backend.save_hf(tmp_path / "saved")
        weights = critic.weights()
    saved, held = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder))
    assert saved.keys() == held.keys() | {"score.weight", "score.bias"}
    assert all(torch.equal(saved[name], tensor) for name, tensor in held.items())
    with opened_one(tmp_path / "saved", head="value") as again:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in again.weights().items())


def test_a_bridge_that_two_distributions_offer(monkeypatch, folder):
    from importlib.metadata import EntryPoint

    from slime_megatron import folder as module

    both = [EntryPoint("qwen3", f"{dist}:Qwen3", "slime_megatron.bridges") for dist in ("acme", "other")]
    monkeypatch.setattr(module, "entry_points", lambda **asked: both)
    with pytest.raises(ModelError, match=r"more than once.*acme"):
        module.bridge_of("qwen3")


def test_two_roles_in_one_process(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "critic")
    training = TrainingBatch.make()
    with opened_one(folder) as actor, opened_one(tmp_path / "critic", head="value") as critic:
        assert set(critic.scores(training)) == {"values"}
        assert set(actor.scores(training)) == {"log_probs"}
        heads = [name for name in critic.weights() if "score" in name or "lm_head" in name]
        assert sorted(heads) == ["score.bias", "score.weight"]
