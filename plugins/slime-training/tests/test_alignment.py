"""Alignment of weights in memory, and that products do not depend on it afterwards."""

import pytest
import torch
from torch import nn

from slime_training.alignment import ALIGNMENT, align


def displaced(tensor, num_bytes):
    """The same values, at an offset from a multiple of ALIGNMENT."""
    size = tensor.element_size()
    memory = torch.empty(tensor.numel() + 2 * ALIGNMENT // size, dtype=tensor.dtype)
    first = (-memory.data_ptr() % ALIGNMENT + num_bytes) // size
    return memory[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.bits
@pytest.mark.parametrize("shape", [(1, 24), (1, 1024), (64, 8), (300, 64)])
def test_a_layer_gives_the_same_bits_wherever_its_weight_was(shape):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0])
    weight = layer.weight.detach().clone()
    inputs = [torch.randn(rows, shape[1]) for rows in (1, 2, 5, 31, 33)]
    expected = [layer(x) for x in inputs]
    for num_bytes in (4, 8, 12, 20, 36, 56):
        layer.weight.data = displaced(weight, num_bytes)
        align(layer)
        assert all(torch.equal(layer(x), found) for x, found in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unaligned_weights_are_moved_and_stay_the_same_objects(dtype):
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)).to(dtype)
    model[1].weight = model[0].weight
    model[0].weight.data = displaced(model[0].weight.data, 4)
    model[2].running_mean.data = displaced(torch.arange(7, dtype=dtype), 36)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    stays = model[2].weight.data_ptr()
    align(model)
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in model.state_dict().values())
    assert model[1].weight is model[0].weight
    assert model[2].weight.data_ptr() == stays
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_tensors_without_memory_are_unchanged():
    with torch.device("meta"):
        layer = nn.Linear(3, 5)
    align(layer)
    assert layer.weight.is_meta
