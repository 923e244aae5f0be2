"""Experts that are refused. Whole models are in test_spread_models.py."""

from types import SimpleNamespace

import pytest
import torch

from slime_sglang.server.param_shards import experts
from slime_sglang.server.sizes import CheckpointSizes


class UnquantizedFusedMoEMethod:
    """SGLang's, which is known by its name."""


class Marlin:
    """Another one."""


SIZES = CheckpointSizes.of(SimpleNamespace())


def module(**more):
    attributes = {"quant_method": UnquantizedFusedMoEMethod(), "use_presharded_weights": False}
    return SimpleNamespace(**attributes | more, moe_runner_config=SimpleNamespace(is_gated=True))


def test_experts_that_files_have_in_another_form_are_refused():
    """Those of Qwen3-VL's mixtures are one tensor: compared under names of single ones, no push would ever seem right."""
    found = experts("model.language_model.layers.0.mlp.experts.w13_weight", module(), torch.zeros(2, 6, 4), SIZES)
    with pytest.raises(NotImplementedError, match="is called in files is not known"):
        next(found)


@pytest.mark.parametrize("more", [{"quant_method": Marlin()}, {"use_intel_amx_backend": True}, {"_dwdp_bound": True}])
def test_experts_in_the_order_of_a_kernel_are_refused(more):
    found = experts("model.layers.0.mlp.experts.w13_weight", module(**more), torch.zeros(2, 6, 4), SIZES)
    with pytest.raises(NotImplementedError, match="is in the order of a kernel"):
        next(found)
