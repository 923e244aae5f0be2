"""On one GPU: steps against those on the CPU. Kernels that torch compiles round some last bits in another way."""

import pytest
import torch

from slime_core.contracts.optimizer import OptimizerConfig
from slime_optimizers.adamw_8bit import EightBitAdamW
from slime_optimizers.config import EightBitConfig, MuonConfig
from slime_optimizers.muon import Muon

pytestmark = pytest.mark.gpu
MAKERS = {
    "muon": lambda groups, keys: Muon(groups, keys, MuonConfig()),
    "adamw_8bit": lambda groups, keys: EightBitAdamW(groups, keys, EightBitConfig()),
}


@pytest.mark.parametrize(("name", "share"), [("muon", 0.02), ("adamw_8bit", 0.01)])
def test_steps_are_those_of_the_cpu(name, share):
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(512, 1024, generator=draw)
    gradients = [torch.randn(start.shape, generator=draw) for _ in range(4)]
    found = []
    for device in ("cuda", "cpu"):
        weight = torch.nn.Parameter(start.to(device, copy=True))
        groups = [{"params": [weight], "weight_decay": 0.1, "hidden": True}]
        optimizer = MAKERS[name](groups, OptimizerConfig(lr=0.01))
        for gradient in gradients:
            weight.grad = gradient.to(device)
            optimizer.step()
        found.append(weight.detach().cpu())
    assert (found[0] - found[1]).norm() < share * (found[1] - start).norm()
