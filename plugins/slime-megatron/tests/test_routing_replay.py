"""Routing replay, against transformers' models that are forced to use the same experts."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import COMMON, FAMILIES, load_family, make_family
from layouts import LARGE_STEPS, with_expert_ids
from test_layouts import CP2, EP2, PP2, SP2, VPP2, assert_close, gradients, joined

from slime_core.contracts.backend import REFERENCE
from slime_core.contracts.setup import RoutingReplay
from slime_core.errors import ConfigError, ModelError, TrainingError
from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_training import SPLITS, WHOLE, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

FLOAT32 = 1e-4
"""Tolerance of float32 against float64, in nats; for gradients, relative to the largest."""
MOES = ["qwen3-moe", "qwen3-moe-plain-gates", "qwen3-next", "glm-4.5", "deepseek-v3"]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
OF_EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def sizes(family):
    """(layers, experts, experts per token)"""
    _, config = FAMILIES[family]
    return COMMON["num_hidden_layers"], 8, config["num_experts_per_tok"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = make_family(tmp_path_factory.mktemp("model") / family, family)
        return made[family]

    return of


class Forced:
    """A transformers model that uses given experts, by sequence, or (without) its own and records them."""

    def __init__(self, model, batch, ids=None):
        """`ids`: (N, L, K) for the tokens of the batch."""
        self.model, self.own = model, {}
        self.ids = {}
        if ids is not None:
            for start, end in zip(batch.token_offsets, batch.token_offsets[1:], strict=False):
                self.ids[tuple(batch.tokens[start:end])] = torch.from_numpy(ids[start:end].astype(np.int64))
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "route_tokens_to_experts"):
                layer.mlp.route_tokens_to_experts = types.MethodType(self.by_sigmoid(number), layer.mlp)
            elif hasattr(layer.mlp, "gate"):
                layer.mlp.gate.forward = types.MethodType(self.by_softmax(number), layer.mlp.gate)

    def by_softmax(self, number):
        def forward(gate, hidden):
            logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.t()
            probabilities = logits.softmax(-1)
            chosen = self.chosen(number, probabilities, gate.top_k)
            weights = probabilities.gather(1, chosen)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward

    def by_sigmoid(self, number):
        choose = type(self.model.model.layers[number].mlp).route_tokens_to_experts

        def route(block, logits):
            own, _ = choose(block, logits)
            chosen = self.chosen(number, None, block.top_k, own)
            weights = logits.sigmoid().gather(1, chosen)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return chosen, weights * block.routed_scaling_factor

        return route

    def chosen(self, number, scores, top_k, own=None):
        if self.tokens in self.ids:
            return self.ids[self.tokens][:, number]
        found = scores.topk(top_k).indices if own is None else own
        self.own.setdefault(self.tokens, {})[number] = found
        return found

    def __call__(self, input_ids, **more):
        self.tokens = tuple(input_ids[0].tolist())
        return self.model(input_ids=input_ids, **more)

    def choices(self, batch):
        """(N, L, K) of its own, after it was called for every sample; 0 in dense layers."""
        layers = len(self.model.model.layers)
        rows = []
        for start, end in zip(batch.token_offsets, batch.token_offsets[1:], strict=False):
            of_layer = self.own[tuple(batch.tokens[start:end])]
            empty = torch.zeros_like(next(iter(of_layer.values())))
            rows.append(torch.stack([of_layer.get(number, empty) for number in range(layers)], 1))
        return torch.cat(rows).numpy().astype(np.uint8)

    def zero_grad(self):
        self.model.zero_grad()

    def named_parameters(self):
        return self.model.named_parameters()


def exact(folder, batch, ids=None):
    return Forced(load_family(folder, torch.float64), batch, ids)


def own_choices(folder, batch):
    model = exact(folder, batch)
    with torch.no_grad():
        TrainingBatch.make().by_transformers(model)
    return model.choices(batch)


def after_steps(folder, training, replay, *, split=WHOLE, scored=WHOLE, steps=1, **options):
    """Log-probs, and weights before and after."""
    with opened(
        Megatron.build(Megatron.Config(**options)), Place(model=folder), optimizer=LARGE_STEPS, routing_replay=replay
    ) as one:
        scores = one.scores(training, scored, entropy=True)
        before = one.weights()
        reports = [one.backend.train_step(training.micros(split), objective_of()) for _ in range(steps)]
        return scores, before, one.weights(), reports


def assert_same_step(before, after, expected, tolerance=FLOAT32):
    """A step of plain descent subtracts learning rate times gradient."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    expected = as_in_folders(expected)
    assert expected.keys() == before.keys() - {name for name in before if name.endswith("e_score_correction_bias")}
    for name, gradient in expected.items():
        got = (before[name].double() - after[name].double()) / LARGE_STEPS.lr
        apart = float((got - gradient).abs().max())
        assert apart <= tolerance * scale, f"the gradient of {name} is off by {apart:.3g} of {scale:.3g}"


def as_in_folders(tensors):
    """Splits the experts of a layer, which transformers holds in one tensor."""
    found = {}
    for name, tensor in tensors.items():
        place, _, kind = name.rpartition(".experts.")
        if not place:
            found[name] = tensor
            continue
        for expert, of_expert in enumerate(tensor):
            parts = {"down_proj": of_expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), of_expert.chunk(2), strict=True))
            found |= {f"{place}.experts.{expert}.{part}.weight": value for part, value in parts.items()}
    return found


@pytest.mark.parametrize("family", MOES)
def test_the_engines_choice_is_used_and_gates_are_the_trainers(folder_of, family):
    folder = folder_of(family)
    training = with_expert_ids(TrainingBatch.make(), *sizes(family))
    model = exact(folder, training.batch, training.batch.routed_experts)
    log_probs, entropies = model_scores(training, model)
    free, _ = model_scores(training, exact(folder, training.batch))
    assert float((free - log_probs).abs().max()) > 0.1, "the choice changes nothing"
    scores, before, after, _ = after_steps(folder, training, RoutingReplay.ROLLOUT, split=SPLITS[1])
    assert_close("log-probs", torch.from_numpy(scores["log_probs"]), log_probs, FLOAT32)
    assert_close("entropies", torch.from_numpy(scores["entropy"]), entropies, FLOAT32)
    expected = training.gradients_by_transformers(model)
    gates = [gradient for name, gradient in expected.items() if name.endswith("mlp.gate.weight")]
    assert all(float(gradient.abs().max()) > 0 for gradient in gates)
    assert len(gates) in (3, 4)
    # Rounding grows in the states of linear attention, which transformers computes in float32 in any precision.
    assert_same_step(before, after, expected, 10 * FLOAT32 if family == "qwen3-next" else FLOAT32)


@torch.no_grad()
def model_scores(training, model):
    return training.by_transformers(model)


def test_the_trainers_own_choice_replayed_is_no_replay_to_the_bit(folder_of):
    folder, plain = folder_of("qwen3-moe"), TrainingBatch.make()
    own = replace(plain, batch=replace(plain.batch, routed_experts=own_choices(folder, plain.batch)))
    scores, _, after, _ = after_steps(folder, plain, None, split=SPLITS[0])
    replayed, _, replayed_after, _ = after_steps(folder, own, RoutingReplay.ROLLOUT, split=SPLITS[0])
    for name in scores:
        assert np.array_equal(scores[name], replayed[name]), name
    for name in after:
        assert torch.equal(after[name], replayed_after[name]), name


@pytest.mark.parametrize("family", ["glm-4.5", "deepseek-v3"])
def test_recorded_under_the_same_weights_is_no_replay_to_the_bit(folder_of, family):
    plain = TrainingBatch.make()
    # Expert ids of an engine, which are not used here.
    given = with_expert_ids(plain, *sizes(family))
    _, _, after, _ = after_steps(folder_of(family), plain, None, split=SPLITS[0])
    _, _, replayed, _ = after_steps(folder_of(family), given, RoutingReplay.RECORDED, split=SPLITS[0], scored=SPLITS[1])
    for name in after:
        assert torch.equal(after[name], replayed[name]), name


@pytest.mark.parametrize("family", ["qwen3-moe", "glm-4.5"])
def test_what_scores_recorded_is_replayed_under_later_weights(folder_of, family):
    folder, training = folder_of(family), TrainingBatch.make()
    recorded = own_choices(folder, training.batch)
    model = exact(folder, training.batch, recorded)
    first = training.gradients_by_transformers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= LARGE_STEPS.lr * first[name]
    second = training.gradients_by_transformers(model)
    free = Forced(model.model, training.batch)
    model_scores(training, free)
    moved = np.sort(free.choices(training.batch)) != np.sort(recorded)
    assert moved.any(-1).mean() > 0.02, "the routers choose as before"

    total = {name: first[name] + second[name] for name in first}
    _, before, after, _ = after_steps(
        folder, training, RoutingReplay.RECORDED, split=SPLITS[0], scored=SPLITS[1], steps=2
    )
    assert_same_step(before, after, total, tolerance=5 * FLOAT32)


def test_copies_choose_by_themselves(folder_of):
    folder, plain = folder_of("qwen3-moe"), TrainingBatch.make()
    given = with_expert_ids(plain, *sizes("qwen3-moe"))
    with opened(
        Megatron.build(Megatron.Config()), Place(model=folder), routing_replay=RoutingReplay.ROLLOUT,
        frozen_models={REFERENCE: folder},
    ) as one:  # fmt: skip
        reference = one.scores(given, weights=REFERENCE)["log_probs"]
        free = one.scores(plain)["log_probs"]
        assert np.array_equal(reference, free)
        assert np.abs(one.scores(given)["log_probs"] - free).max() > 0.1


CASES = {
    "one": (1, {}),
    "dp2-ep2": (2, EP2),
    "tp2-sp": (2, SP2),
    "pp2": (2, PP2),
    "pp2-vpp2": (2, VPP2),
    "cp2": (2, CP2),
    "tp2-sp-cp2": (4, {**SP2, **CP2}),
    "recomputed": (1, FULL),
    "pp2-recomputed": (2, {**PP2, **FULL}),
    "some-recomputed": (1, SOME),
    "experts-recomputed": (1, OF_EXPERTS),
}
REPLAYED = {
    ("qwen3-moe", "rollout"): (
        "one", "dp2-ep2", "tp2-sp-cp2", "pp2", "cp2", "recomputed", "pp2-recomputed", "some-recomputed",
        "experts-recomputed",
    ),
    # The first layer is dense.
    ("glm-4.5", "rollout"): ("one", "pp2-vpp2"),
    ("glm-4.5", "recorded"): ("one", "dp2-ep2", "tp2-sp", "pp2-vpp2", "cp2", "pp2-recomputed"),
}  # fmt: skip


@pytest.fixture(scope="module")
def layouts(folder_of, tmp_path_factory):
    from conftest import run_layouts

    done = {}

    def of(family, replay):
        if (family, replay) not in done:
            case = {"model": str(folder_of(family)), "replay": replay, "sizes": sizes(family)}
            cases = {
                name: {**case, "world_size": CASES[name][0], "options": CASES[name][1]}
                for name in REPLAYED[family, replay]
            }
            done[family, replay] = run_layouts(tmp_path_factory.mktemp("layouts"), cases)
        return done[family, replay]

    return of


@pytest.mark.parametrize(("family", "replay"), list(REPLAYED))
def test_layouts_replay_like_one_rank(layouts, family, replay):
    (one,) = layouts(family, replay).ranks("one")
    expected = gradients(one)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in REPLAYED[family, replay]:
        ranks = layouts(family, replay).ranks(name)
        assert_close(f"{name}: log-probs", joined(ranks, "log_probs"), one["scores"]["log_probs"], 2e-5)
        for tensor, gradient in gradients(ranks[0]).items():
            apart = float((gradient - expected[tensor]).abs().max())
            assert apart <= 1e-4 * scale, f"{name}: the gradient of {tensor} is off by {apart:.3g} of {scale:.3g}"


def test_what_cannot_be_replayed_is_an_error(folder_of, tiny_base):
    folder, plain = folder_of("qwen3-moe"), TrainingBatch.make()

    def micros(*shape):
        return with_expert_ids(plain, *shape).micros()

    with opened(Megatron.build(Megatron.Config()), Place(model=folder), routing_replay=RoutingReplay.ROLLOUT) as one:
        with pytest.raises(TrainingError, match=r"of 3 layers, 2 experts per token .* has 4 layers and uses 2 of 8"):
            one.backend.forward_only(micros(3, 8, 2))
        with pytest.raises(TrainingError, match=r"ids up to 8; .* uses 2 of 8"):
            one.backend.train_step(micros(4, 9, 2), objective_of())
    with opened(Megatron.build(Megatron.Config()), Place(model=folder), routing_replay=RoutingReplay.RECORDED) as one:
        one.scores(plain, ((0, 1),))
        with pytest.raises(TrainingError, match="sample 2 of the shard was trained, but its old log-probs"):
            one.backend.train_step(plain.micros(), objective_of())
    refused = [
        (tiny_base, {}, ModelError, "the model has no experts"),
        (folder, {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}, ConfigError, "sinkhorn"),
    ]
    for model, options, kind, message in refused:
        backend = Megatron.build(Megatron.Config(**options))
        with (
            pytest.raises(kind, match=message),
            opened(backend, Place(model=model), routing_replay=RoutingReplay.RECORDED),
        ):
            pass
