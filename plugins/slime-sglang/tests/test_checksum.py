"""Experts as a server holds them, under the names of the files. The whole model: test_experts_live.py."""

from types import SimpleNamespace

import pytest
import torch

from slime_sglang.server.checksum import experts


class UnquantizedFusedMoEMethod:
    """SGLang's, which is known by its name."""


MODULE = SimpleNamespace(quant_method=UnquantizedFusedMoEMethod())


def test_stacked_experts_are_taken_apart():
    """Two of them, three wide where one place is padding, gate above up."""
    both = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    down = torch.arange(2 * 4 * 3.0).view(2, 4, 3)
    found = dict(experts("model.layers.7.mlp.experts.w13_weight", MODULE, both, 2))
    found |= dict(experts("model.layers.7.mlp.experts.w2_weight", MODULE, down, 2))
    for number in range(2):
        before = f"model.layers.7.mlp.experts.{number}"
        assert torch.equal(found.pop(f"{before}.gate_proj.weight"), both[number, 0:2])
        assert torch.equal(found.pop(f"{before}.up_proj.weight"), both[number, 3:5])
        assert torch.equal(found.pop(f"{before}.down_proj.weight"), down[number, :, :2])
    assert not found


@pytest.mark.parametrize(
    "path", ["model.layers.0.block_sparse_moe.experts", "model.language_model.layers.0.mlp.experts"]
)
def test_experts_that_files_have_in_another_form_are_refused(path):
    """Mixtral's are w1, w2 and w3 there, those of Qwen3-VL's mixtures one tensor: compared under names like these, no push
    would ever seem right."""
    found = experts(f"{path}.w13_weight", MODULE, torch.zeros(2, 6, 4), None)
    with pytest.raises(NotImplementedError, match="is called in files is not known"):
        next(found)
