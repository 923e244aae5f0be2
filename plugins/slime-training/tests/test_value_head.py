"""Where a critic's head starts from."""

import pytest
import torch

from slime_training.value_head import start_value_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_from_the_seed(dtype):
    head = torch.nn.Linear(4095, 1, dtype=dtype)
    start_value_head(head.weight, head.bias, 3)
    normal = torch.randn((1, 4095), generator=torch.Generator().manual_seed(3))
    assert torch.equal(head.weight, (normal / 64).to(dtype))
    assert head.bias.tolist() == [0.0]
    start_value_head(head.weight, None, 4)
    assert not torch.equal(head.weight, (normal / 64).to(dtype))
