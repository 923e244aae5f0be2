"""Auxiliary losses of experts, against their formulas over the routing of transformers."""

import pytest
import torch
from families import load_family, make_family

from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_training import SPLITS, WHOLE, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

AUX, Z = 0.3, 0.02
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model") / "qwen3-moe", "qwen3-moe")


BY_SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": AUX}


def step(folder, split, options):
    training = TrainingBatch.make()
    with opened(Megatron.build(Megatron.Config(**options)), Place(model=folder)) as one:
        before = one.weights()
        one.backend.train_step(training.micros(split), objective_of())
        return {name: before[name] - tensor for name, tensor in one.weights().items()}


def by_formula(folder, split):
    """Mean over the step's tokens, including prompts, of Switch's load balancing (arXiv 2101.03961, equation 4, for several
    experts per token) over each micro-batch, and of the router's squared log-sum-exp (arXiv 2202.08906, equation 5)."""
    micros = TrainingBatch.make().micros(split)
    total = sum(micro.num_tokens for micro in micros)

    def loss(logits, micro, config):
        return micro.num_tokens / total * (AUX * balance(logits, config) + Z * logits.logsumexp(-1).square().mean())

    return gradients_of(folder, micros, loss)


def by_sequence_formula(folder, split):
    """Mean over the step's sequences of the loss of each of them alone (arXiv 2412.19437, equations 17 to 20)."""
    micros = TrainingBatch.make().micros(split)
    total = sum(micro.num_samples for micro in micros)

    def loss(logits, micro, config):
        lengths = micro.cu_seqlens.diff().tolist()
        parts = logits.split(lengths)[: micro.num_samples]
        return sum((AUX / total * balance(part, config) for part in parts), start=torch.zeros((), dtype=torch.float64))

    return gradients_of(folder, micros, loss)


def balance(logits, config):
    """(N, E) logits of tokens that are balanced together."""
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(config.num_experts_per_tok).indices.flatten()
    share = torch.bincount(chosen, minlength=config.num_experts).double() / len(chosen)
    return config.num_experts * (probabilities.mean(0) * share).sum()


def gradients_of(folder, micros, loss_of):
    """Of the sum over micro-batches and layers of `loss_of` (logits (N, E), micro-batch, config), in float64, with each
    sequence in a forward of its own."""
    model = load_family(folder, torch.float64)
    loss = 0.0
    inputs = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_pre_hook(
            lambda _, given, number=number: inputs.setdefault(number, []).append(given[0].flatten(0, -2))
        )
    for micro in micros:
        inputs.clear()
        for start, end in zip(micro.cu_seqlens[:-1].tolist(), micro.cu_seqlens[1:].tolist(), strict=True):
            model(input_ids=micro.tokens[None, start:end], use_cache=False)
        for number, layer in enumerate(model.model.layers):
            logits = torch.cat(inputs[number]) @ layer.mlp.gate.weight.t()
            loss = loss + loss_of(logits, micro, model.config)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("split", [WHOLE, SPLITS[1]], ids=["whole", "uneven"])
def test_auxiliary_losses_are_means_over_the_steps_tokens(folder, split):
    compare(step(folder, split, {}), step(folder, split, BALANCED), by_formula(folder, split), at_least=1e-3)


@pytest.mark.parametrize("split", [WHOLE, SPLITS[1]], ids=["whole", "uneven"])
def test_the_loss_of_each_sequence_does_not_depend_on_packing(folder, split):
    expected = by_sequence_formula(folder, WHOLE)
    compare(step(folder, split, {}), step(folder, split, BY_SEQUENCE), expected, at_least=1e-4)
    together = {name: gradient.clone() for name, gradient in by_formula(folder, WHOLE).items()}
    assert (together["model.layers.0.mlp.gate.weight"] - expected["model.layers.0.mlp.gate.weight"]).abs().max() > 1e-3


def compare(plain, balanced, expected, *, at_least):
    """`at_least`: the size of gradients that are compared."""
    compared = 0
    for name, gradient in expected.items():
        if name not in plain or not gradient.abs().max() > at_least:
            continue
        # Except the first row of the embedding, which transformers does not train: the one token of an empty micro-batch
        # counts.
        first = 1 if name == "model.embed_tokens.weight" else 0
        apart = (balanced[name] - plain[name] - gradient)[first:].abs().max()
        assert apart <= 2e-5 * max(1.0, float(gradient.abs().max())), f"{name} is off by {apart:.3g}"
        compared += "gate" in name
    assert compared == 4
