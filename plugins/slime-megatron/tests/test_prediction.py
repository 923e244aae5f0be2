"""Layers of multi-token prediction, against transformers' decoder layers combined by the formula of DeepSeek's report."""

import json
import re

import numpy as np
import pytest
import torch
from families import COMMON, FAMILIES, STACKED, stack_experts
from safetensors.torch import load_file, save_file
from test_layouts import CP2, EP2, PP2, SP2, VPP2, assert_close, gradients
from test_routing_replay import as_in_folders
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.config.part import PluginSpec
from slime_core.errors import ModelError
from slime_core.registry import Registry
from slime_megatron.plugin import Megatron
from slime_models.convert import convert
from slime_plugin_kit.tiny_training import PROMPTS, SPLITS, WHOLE, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

FACTOR = 0.7
LAYERS = COMMON["num_hidden_layers"]
EXTRA = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")

LINEAR = ("qwen3-next", "qwen3.5-moe")

MIMO = dict(
    zip(
        EXTRA,
        [f"{name}.weight" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")],
        strict=True,
    )
)
QWEN_NEXT = dict(
    zip(
        EXTRA, [f"{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")], strict=True
    )
)


def config_of(family, count):
    """transformers' config of all layers, with the prediction layers behind the others."""
    model_type, sizes = FAMILIES[{"mimo": "qwen2.5", "qwen3.5-moe": "qwen3.5-moe-text"}.get(family, family)]
    fields = {**COMMON, **sizes, "num_hidden_layers": LAYERS + count}
    if family in LINEAR:
        fields["layer_types"] = ["linear_attention"] * (LAYERS - 1) + ["full_attention"] * (1 + count)
    if "mlp_layer_types" in sizes:
        fields["mlp_layer_types"] = [*sizes["mlp_layer_types"], *["sparse"] * count]
    return AutoConfig.for_model(model_type, **fields)


def make_folder(folder, family, count):
    """A model whose last `count` layers predict further ahead, in the released form; beside it, in `exact`, the same weights by
    DeepSeek's names."""
    config = config_of(family, count)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.randn_like(tensor)
                tensor.copy_(noise * 0.2 if tensor.ndim > 1 else tensor + 0.1 * noise)
    exact = folder / "exact"
    model.save_pretrained(exact)
    weights = load_file(exact / "model.safetensors")
    hidden = config.hidden_size
    for layer in range(LAYERS, LAYERS + count):
        for name in EXTRA:
            shape = (hidden, 2 * hidden) if name.startswith("eh") else (hidden,)
            value = torch.randn(shape) * 0.2
            weights[f"model.layers.{layer}.{name}"] = value if len(shape) == 2 else 1 + value / 2
    save_file(weights, exact / "model.safetensors", metadata={"format": "pt"})
    released = {name: tensor.contiguous() for name, tensor in map(as_released(family), weights.items())}
    save_file(released, folder / "model.safetensors", metadata={"format": "pt"})
    if family in STACKED:
        stack_experts(folder / "model.safetensors")
    raw = json.loads((exact / "config.json").read_text())
    raw |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": count}
    for kinds in ("layer_types", "mlp_layer_types"):
        if kinds in raw:
            raw[kinds] = raw[kinds][:LAYERS]
    if family == "mimo":
        raw |= {"model_type": "mimo", "attention_bias": True}
    if family == "qwen3-next":
        del raw["num_nextn_predict_layers"]
    if family == "qwen3.5-moe":
        raw["mtp_num_hidden_layers"] = raw.pop("num_nextn_predict_layers")
        raw = {"model_type": "qwen3_5_moe", "text_config": raw, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def as_released(family):
    """Converts DeepSeek's name and tensor to the family's own."""

    def moved(item):
        name, tensor = item
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None or int(found[1]) < LAYERS:
            return re.sub(r"^model\.", "model.language_model." if family == "qwen3.5-moe" else "model.", name), tensor
        number, rest = int(found[1]) - LAYERS, found[2]
        if family == "mimo":
            if rest == "eh_proj.weight":
                tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
            return f"model.mtp_layers.{number}.{MIMO.get(rest, rest)}", tensor
        if family in LINEAR:
            return (f"mtp.{QWEN_NEXT[rest]}" if rest in EXTRA else f"mtp.layers.{number}.{rest}"), tensor
        return name, tensor

    return moved


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def of(family, count):
        if (family, count) not in made:
            made[family, count] = make_folder(tmp_path_factory.mktemp("model") / family, family, count)
        return made[family, count]

    return of


class Exact:
    """Reference in float64: all layers as one transformers model, and the connections between the last ones."""

    def __init__(self, folder, family, count):
        folder, config = folder / "exact", config_of(family, count)
        # These families' norms scale by one more than their weight.
        self.scale_of = (lambda weight: 1 + weight) if family in LINEAR else (lambda weight: weight)
        config._attn_implementation, config._experts_implementation = "eager", "eager"
        weights = load_file(folder / "model.safetensors")
        self.extra = {name: t.double() for name, t in weights.items() if name.endswith(EXTRA)}
        whole = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.model, self.config, self.count = whole.eval(), config, count

    def trained(self):
        """Weights of the prediction layers, by names of the folder."""
        ours = tuple(f"model.layers.{LAYERS + number}." for number in range(self.count))
        return {
            name: parameter
            for name, parameter in [*self.model.named_parameters(), *self.extra.items()]
            if name.startswith(ours)
        }

    def norm(self, x, weight):
        return self.scale_of(weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def loss_sums(self, tokens, prompt, mask):
        """Sum and count of each depth's cross-entropies for one sequence."""
        inner, length = self.model.model, len(tokens)
        ids = torch.tensor(tokens)[None]
        positions = torch.arange(length)[None]
        causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        arguments = {"attention_mask": causal, "position_ids": positions}
        with torch.no_grad():
            hidden = inner.embed_tokens(ids)
            arguments["position_embeddings"] = inner.rotary_emb(hidden, positions)
            for layer in inner.layers[:LAYERS]:
                hidden = layer(hidden, **arguments)
            hidden = inner.norm(hidden)
        sums = []
        for depth in range(1, self.count + 1):
            place = f"model.layers.{LAYERS + depth - 1}."
            shifted = [*tokens[depth:], *[0] * depth][:length]
            with torch.no_grad():
                embedding = inner.embed_tokens(torch.tensor(shifted)[None])
            both = [
                self.norm(embedding, self.extra[place + "enorm.weight"]),
                self.norm(hidden, self.extra[place + "hnorm.weight"]),
            ]
            hidden = torch.cat(both, -1) @ self.extra[place + "eh_proj.weight"].t()
            hidden = inner.layers[LAYERS + depth - 1](hidden, **arguments)
            hidden = self.norm(hidden, self.extra[place + "shared_head.norm.weight"])
            log_p = (hidden[0] @ self.model.lm_head.weight.detach().t()).log_softmax(-1)
            total, count = torch.zeros((), dtype=torch.float64), 0
            for place_of, trained in enumerate(mask):
                position = prompt + place_of - 1 - depth
                if trained and position >= 0:
                    total = total - log_p[position, tokens[prompt + place_of]]
                    count += 1
            sums.append((total, count))
        return sums


def by_formula(folder, family, count):
    """Means, and gradients of the loss by names of the folder."""
    exact, batch = Exact(folder, family, count), TrainingBatch.make().batch
    for tensor in exact.trained().values():
        tensor.requires_grad_(True)
    totals, counts = [0.0] * count, [0] * count
    for sample, prompt in enumerate(PROMPTS):
        start, end = batch.token_offsets[sample : sample + 2]
        first, last = batch.response_offsets[sample : sample + 2]
        sums = exact.loss_sums(batch.tokens[start:end].tolist(), prompt, batch.mask[first:last])
        for depth, (total, number) in enumerate(sums):
            totals[depth] = totals[depth] + total
            counts[depth] += number
    means = [total / number for total, number in zip(totals, counts, strict=True)]
    (FACTOR * sum(means) / count).backward()
    grads = {name: tensor.grad for name, tensor in exact.trained().items() if tensor.grad is not None}
    return [float(mean) for mean in means], dict(map(as_released(family), as_in_folders(grads).items()))


def after_step(folder, count, *, split=WHOLE, factor=FACTOR, **options):
    config = Megatron.Config(mtp_num_layers=count, mtp_loss_scaling_factor=factor, **options)
    training = TrainingBatch.make()
    with opened(Megatron.build(config), Place(model=folder)) as one:
        scores = one.scores(training, SPLITS[0])
        before = one.weights()
        report = one.backend.train_step(training.micros(split), objective_of())
        return scores, before, one.weights(), report


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("glm-4.5", 1),
        ("glm-4.5", 2),
        ("glm-4.7-flash", 1),
        ("deepseek-v3", 1),
        ("deepseek-v3.2", 1),
        ("mimo", 2),
        ("qwen3-next", 1),
        ("qwen3.5-moe", 1),
    ],
)
def test_they_learn_by_the_formula_and_nothing_else_changes(folder_of, family, count):
    folder = folder_of(family, count)
    means, expected = by_formula(folder, family, count)
    scores, before, after, report = after_step(folder, count, split=SPLITS[1])
    plain, _, plain_after, plain_report = after_step(folder, 0, split=SPLITS[1])
    for depth, mean in enumerate(means, 1):
        assert report.sums[f"mtp_{depth}_loss"] == pytest.approx(mean, rel=1e-5)
    assert report.sums["mtp_loss"] == pytest.approx(sum(means), rel=1e-5)
    assert "mtp_loss" not in plain_report.sums
    assert np.array_equal(scores["log_probs"], plain["log_probs"])
    # Trunk, embedding and head learn the same as without these layers.
    assert after.keys() - plain_after.keys() == {
        name
        for name in before
        if name.startswith(("mtp.", "model.mtp_layers.", *(f"model.layers.{LAYERS + n}." for n in range(count))))
    }
    for name, tensor in plain_after.items():
        assert torch.equal(after[name], tensor), name
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-3
    untrained = ("e_score_correction_bias", ".indexer.")
    learning = {name for name in after.keys() - plain_after.keys() if not any(part in name for part in untrained)}
    assert learning == expected.keys()
    for name, gradient in expected.items():
        apart = float((before[name].double() - after[name].double() - gradient).abs().max())
        assert apart <= 1e-4 * scale, f"the gradient of {name} is off by {apart:.3g} of {scale:.3g}"


CASES = {
    "one": (1, {}),
    "tp2-sp": (2, SP2),
    "cp2": (2, CP2),
    "dp2-ep2": (2, EP2),
    "pp2-vpp2": (2, VPP2),
    "tp2-sp-cp2": (4, {**SP2, **CP2}),
    "tp2-sp-pp2": (4, {**SP2, **PP2}),
}


def test_layouts_learn_like_one_rank(folder_of, tmp_path):
    from conftest import run_layouts

    predicting = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": FACTOR}
    cases = {
        name: {"model": str(folder_of("glm-4.5", 2)), "world_size": count, "options": {**predicting, **options}}
        for name, (count, options) in CASES.items()
    }
    # Two steps: the last stage reads rows that the first one has trained. Then another layout continues.
    kept, twice = str(tmp_path / "kept"), {"adam": True, **cases["one"]}
    cases |= {
        "twice": {**twice, "save": str(tmp_path / "unread")},
        "twice, pp2": {**twice, "world_size": 2, "options": {**predicting, **PP2}, "save": kept},
        "pp2 to one": {**twice, "load": kept},
    }
    done = run_layouts(tmp_path, cases)
    (expected,), (got, _), (moved,) = (done.ranks(name) for name in ("twice", "twice, pp2", "pp2 to one"))
    for name in expected["after"]:
        assert_close(f"pp2, two steps: {name}", got["after"][name], expected["after"][name], 1e-4)
        assert_close(f"pp2 to one: {name}", moved["after"][name], expected["next"][name], 1e-4)
    (one,) = done.ranks("one")
    expected = gradients(one)
    ahead = [name for name in expected if name.startswith((f"model.layers.{LAYERS}.", f"model.layers.{LAYERS + 1}."))]
    scale = max(float(expected[name].abs().max()) for name in ahead)
    for name in CASES:
        ranks = done.ranks(name)
        got = gradients(ranks[0])
        for tensor in ahead:
            assert_close(f"{name}: the gradient of {tensor}", got[tensor], expected[tensor], 2e-5 * scale)
        for metric in ("mtp_1_loss", "mtp_2_loss", "mtp_loss"):
            total = sum(rank["sums"].get(metric, 0.0) for rank in ranks)
            assert total == pytest.approx(one["sums"][metric], rel=1e-5)


def test_they_are_saved_and_loaded(folder_of, tmp_path):
    folder, training = folder_of("glm-4.5", 1), TrainingBatch.make()
    config = Megatron.Config(mtp_num_layers=1)
    with opened(Megatron.build(config), Place(model=folder)) as one:
        one.backend.train_step(training.micros(), objective_of())
        (tmp_path / "state").mkdir()
        one.backend.save(tmp_path / "state")
        one.backend.save_hf(tmp_path / "hf")
        trained = one.weights()
    with opened(Megatron.build(config), Place(model=folder)) as other:
        other.backend.load(tmp_path / "state")
        loaded = other.weights()
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    source = load_file(folder / "model.safetensors")
    name = f"model.layers.{LAYERS}.eh_proj.weight"
    assert not torch.equal(saved[name], source[name])
    assert saved.keys() == source.keys()
    for name, tensor in trained.items():
        assert torch.equal(loaded[name], tensor), name
        assert torch.equal(saved[name], tensor), name
    convert_to("hf", tmp_path / "state", tmp_path / "converted", hf_checkpoint=str(folder))
    converted = weights_of(tmp_path / "converted")
    assert converted.keys() == trained.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in trained.items())


def convert_to(name, source, target, **options):
    part = PluginSpec(group="slime.converters", name=name, options=options).resolve(Registry())
    convert(part, source, target, workers=1, report=lambda *news: None)


def weights_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_they_are_converted_and_back(folder_of, tmp_path, monkeypatch):
    from megatron.core import parallel_state
    from test_conversion import HereExecutor

    monkeypatch.setattr("slime_models.convert.ProcessPoolExecutor", HereExecutor)
    folder = folder_of("glm-4.5", 2)
    convert_to("torch_dist", folder, tmp_path / "torch_dist")
    convert_to("hf", tmp_path / "torch_dist", tmp_path / "back")
    # A worker would have ended with its groups.
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    got, expected = weights_of(tmp_path / "back"), weights_of(folder)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_what_cannot_be_trained_is_an_error(folder_of, tmp_path):
    raw = json.loads((folder_of("glm-4.5", 1) / "config.json").read_text())
    (problem,) = Megatron.problems(Megatron.Config(mtp_num_layers=2), 1, raw)
    assert problem.startswith(
        "backend.mtp_num_layers = 2: the model has 1 layers of multi-token prediction (num_nextn_predict_layers in its "
        "config.json)"
    )
    from families import make_family

    other = make_family(tmp_path / "qwen3", "qwen3")
    with (
        pytest.raises(ModelError, match="does not train this family's layers"),
        opened(Megatron.build(Megatron.Config(mtp_num_layers=1)), Place(model=other)),
    ):
        pass
