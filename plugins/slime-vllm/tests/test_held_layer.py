"""What a worker compares, without vLLM: layers whose weights stay as they were loaded, as on GPUs, and layers whose weight only
their product shows, as on a CPU."""

import sys

import pytest
import torch
from torch import nn

import slime_vllm

# As in vLLM's interpreter.
sys.path.insert(0, f"{slime_vllm.__path__[0]}/server")

from slime_vllm_server.held_layer import HeldLayer, unequal
from slime_vllm_server.sources import Sources

Q, K = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3) - 9


def load(weight, **tensors):
    """As vLLM's loaders do: each tensor to its rows, and zeros where the layer is padded."""
    for start, tensor in tensors.values():
        weight.data.narrow(0, start, len(tensor)).copy_(tensor)


def linear(rows=6, fill=0.0):
    layer = nn.Linear(3, rows, bias=False).requires_grad_(False)
    layer.weight.fill_(fill)
    return layer


def pack(layer):
    """The weight is in a function alone."""
    packed = layer.weight.data.clone()
    layer.cpu_linear = lambda inputs, weight, bias: inputs @ packed.t()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def reloaded(layer, q=Q, k=K, *, packs=False):
    """Loads the layer anew; returns it as it was, what was written to it, and its weight as a checkpoint has it."""
    held, sources = HeldLayer("attn", layer), Sources()
    weight = layer._parameters["weight"] = nn.Parameter(torch.empty(6, 3), requires_grad=False)
    sources.watch(weight)
    with sources:
        for name, start, tensor in (("q", 0, q), ("k", 4, k)):
            if tensor is not None:
                sources.sent = name
                load(weight, tensor=(start, tensor))
    if packs:
        pack(layer)
    return held, sources, weight


def differences(held):
    return list(held.differences({"weight": torch.Size([6, 3])}))


@pytest.mark.parametrize("packs", [False, True])
def test_equal_weights_have_no_difference(packs):
    layer = linear()
    load(layer.weight, q=(0, Q), k=(4, K))
    if packs:
        pack(layer)
    before, product = layer.weight, getattr(layer, "cpu_linear", None)
    held, sources, weight = reloaded(layer, packs=packs)
    assert differences(held) == []
    assert (sources.num_written(weight), sources.names(weight)) == (18, ["q", "k"])
    assert layer.weight is not before
    held.restore()
    assert layer.weight is before
    assert getattr(layer, "cpu_linear", None) is product


@pytest.mark.parametrize("packs", [False, True])
def test_a_changed_element_is_found_and_named(packs):
    layer = linear()
    load(layer.weight, q=(0, Q), k=(4, K))
    layer.weight[5, 1] = 0.5
    if packs:
        pack(layer)
    held, sources, weight = reloaded(layer, packs=packs)
    (found,) = differences(held)
    assert (found.index, found.held, found.sent, found.packed) == ((5, 1), "0.5", str(float(K[1, 1])), packs)
    assert sources.name_at(weight, found.index) == "k"
    assert sources.name_at(weight, (3, 2)) == "q"


def test_elements_that_no_tensor_reaches_are_counted():
    held, sources, weight = reloaded(linear(), k=None)
    assert (sources.num_written(weight), sources.names(weight)) == (12, ["q"])
    assert sources.name_at(weight, (5, 1)) is None
    sources.forget(weight)
    assert sources.num_written(weight) == 0
    held.restore()


def test_a_loader_is_followed_without_memory_and_again_with_it():
    """vLLM calls a loader with a meta tensor, and later, when other tensors have come, with the real one. Padding counts."""
    sources = Sources()
    bias, weight = torch.empty(4), torch.empty(4, 2, device="meta")
    sources.watch(bias)
    sources.watch(weight)
    with sources:
        sources.sent = "first"
        bias[:3].data.copy_(torch.ones(3))
        bias[3:].data.fill_(0)
        weight[:, :1].data.copy_(torch.ones(4, 1))
        sources.sent = "second"
        bias[:3].data.copy_(torch.ones(3))
        weight.data.narrow(1, 1, 1).zero_()
    assert (sources.num_written(bias), sources.names(bias)[0], sources.name_at(bias, (2,))) == (4, "first", "first")
    assert (sources.num_written(weight), sources.name_at(weight, (3, 0)), sources.name_at(weight, (0, 1))) == (
        8,
        "first",
        "second",
    )


def test_a_layer_of_another_form_differs():
    layer = linear()
    held, *_ = reloaded(layer)
    layer.weight = nn.Parameter(torch.empty(3, 6), requires_grad=False)
    (found,) = differences(held)
    assert (found.index, found.held, found.sent) == (None, "float32 [6, 3]", "float32 [3, 6]")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_bits_are_compared(kind):
    first = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to(kind)
    assert unequal(first, first.clone()) is None
    assert unequal(first.new_empty(0), first.new_empty(0)) is None
    assert unequal(first.t(), first.t().contiguous()) is None
    second = first.clone()
    second[1, 0] = 0
    assert unequal(first, second) == (1, 0)
    if kind.is_floating_point:
        third = first.clone()
        third.view(-1).view(torch.uint8)[-1] |= 128
        assert unequal(first, third) == (1, 1), "minus zero"
        nan = first.float().fill_(torch.nan).to(kind)
        assert unequal(nan, nan.clone()) is None
