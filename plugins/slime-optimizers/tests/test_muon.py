"""Muon against torch.optim.Muon, and its update against one that is computed in float64."""

from copy import deepcopy

import pytest
import torch

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.errors import ConfigError
from slime_optimizers.config import MuonConfig
from slime_optimizers.muon import Muon
from slime_optimizers.whole_matrices import rows_of_ranks


def of_torch(stepped, **options):
    """torch's own two optimizers, over copies."""
    copies = {of: torch.nn.Parameter(value) for of, value in stepped.values().items()}
    matrices = [copies[of] for of, (_, hidden) in stepped.shapes.items() if hidden]
    weight, norm = copies["embedding"], copies["norm"]
    keys = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "fused": True}
    return copies, [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, **options),
        torch.optim.AdamW([weight], weight_decay=0.1, **keys),
        torch.optim.AdamW([norm], weight_decay=0.0, **keys),
    ]


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("options", "of_theirs"),
    [
        ({}, {"adjust_lr_fn": "match_rms_adamw"}),
        (
            {"muon_scale": "original", "muon_nesterov": False, "muon_momentum": 0.8, "muon_steps": 3},
            {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8, "ns_steps": 3},
        ),
    ],
)
def test_steps_are_torchs(options, of_theirs, dtype, stepped, different):
    ours = stepped("muon", dtype=dtype, **options)
    copies, optimizers = of_torch(ours, **of_theirs)
    start = ours.values()
    ours.step(0, 4)
    for number in range(4):
        for of, gradient in stepped.drawn(number).items():
            copies[of].grad = gradient.to(dtype)
        for optimizer in optimizers:
            optimizer.step()
    assert not different(ours.values(), {of: copy.detach() for of, copy in copies.items()})
    assert different(ours.values(), start) == list(ours.shapes)


def test_a_step_is_that_of_the_polynomial_in_float64(stepped):
    """Each singular value goes five times through 3.4445 x - 4.775 x^3 + 2.0315 x^5; bfloat16 rounds by a 256th."""
    ours = stepped("muon")
    start = ours.values()
    ours.step(0, 1)
    for of, gradient in ours.drawn(0).items():
        shape, hidden = ours.shapes[of]
        if not hidden:
            continue
        # The momentum is a twentieth of the gradient, and the update a mixture of both: a multiple of the gradient.
        u, s, v = torch.linalg.svd(gradient.double() / gradient.double().norm(), full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        update = u @ torch.diag(s) @ v
        expected = start[of].double() * (1 - 0.01 * 0.1) - 0.01 * 0.2 * max(shape) ** 0.5 * update
        moved = (start[of].double() - expected).norm()
        assert (ours.values()[of].double() - expected).norm() < 0.03 * moved, of


def test_the_rate_of_adamw_fits(stepped):
    """An update of Muon is as large as one of AdamW: about 0.2 of the learning rate in each element, whatever the shape."""
    ours = stepped("muon")
    start = ours.values()
    ours.step(0, 1)
    for of in ("tall", "wide", "equal"):
        change = (ours.values()[of] - start[of] * (1 - 0.01 * 0.1)) / 0.01
        assert change.square().mean().sqrt() == pytest.approx(0.2, rel=0.25), of


def test_loaded_state_dicts_are_shared_with_adamw(stepped, different):
    one, other = stepped("muon"), stepped("muon")
    one.step(0, 2)
    other.step(5, 1)
    for of, parameter in other.parameters.items():
        parameter.data.copy_(one.parameters[of].data)
    other.optimizer.load_state_dict(deepcopy(one.optimizer.state_dict()))
    one.step(2, 2)
    other.step(2, 2)
    assert not different(one.values(), other.values())


def test_without_matrices_it_is_refused():
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ConfigError, match=r'train\.optimizer = "muon": it steps on matrices'):
        Muon([{"params": [weight], "weight_decay": 0.0}], OptimizerConfig(optimizer="muon"), MuonConfig())


def test_rows_of_ranks_are_those_of_fsdp():
    for rows in range(12):
        for ranks in range(1, 6):
            parts = torch.chunk(torch.zeros(rows, 2), ranks)
            found = rows_of_ranks(rows, ranks)
            assert [number for number in found if number] == [len(part) for part in parts if len(part)]
            assert len(found) == ranks


def test_it_steps_on_linear_layers_and_adamw_on_the_rest(begin):
    trained = begin("muon")
    trained.train(1)
    of = {id(parameter): name for name, parameter in trained.backend._ready.model.model.named_parameters()}
    optimizer = trained.backend._ready.optimizer
    by_muon = {of[id(parameter)] for parameter, state in optimizer.state.items() if "momentum_buffer" in state}
    by_adamw = {of[id(parameter)] for parameter, state in optimizer.state.items() if "exp_avg" in state}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in by_muon} == set(projections)
    assert len(by_muon) == 2 * len(projections)
    assert by_muon | by_adamw == set(of.values())
    assert not by_muon & by_adamw
    assert "model.embed_tokens.weight" in by_adamw
