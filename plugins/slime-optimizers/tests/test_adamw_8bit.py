"""AdamW with moments of 8 bits against torchao's own, and against AdamW in float64."""

import pytest
import torch

from slime_core.contracts.optimizer import OptimizerConfig
from slime_optimizers.adamw_8bit import EightBitAdamW
from slime_optimizers.blocks import block_of
from slime_optimizers.byte_codes import code_map
from slime_optimizers.config import EightBitConfig

KEYS = {"lr": 0.01, "weight_decay": 0.1}


def drawn(seed, shape=(24, 512)):
    """With rows of very different sizes."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise) * torch.logspace(-6, 0, shape[0])[:, None]


def ours(weight):
    groups = [{"params": [weight], "weight_decay": 0.1}]
    return EightBitAdamW(groups, OptimizerConfig(**KEYS), EightBitConfig())


def steps(weight, step, count):
    for number in range(count):
        weight.grad = drawn(1 + number).to(weight.dtype)
        step()
    return weight.detach()


@pytest.mark.torchao
def test_steps_are_torchaos():
    """Where a value lies between two codes, rounding of the last bit decides, so a few codes differ by one."""
    from torchao.optim import AdamW8bit

    one, other = (torch.nn.Parameter(drawn(0)) for _ in range(2))
    mine, theirs = ours(one), AdamW8bit([other], lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    # Otherwise it compiles.
    with torch.compiler.set_stance("force_eager"):
        steps(other, theirs.step, 5)
    steps(one, mine.step, 5)
    start = drawn(0)
    assert (one - other).norm() < 1e-3 * (other - start).norm()
    for moment in ("exp_avg", "exp_avg_sq"):
        state, expected = mine.state_of(one), theirs.state[other][moment]
        apart = state[f"{moment}_codes"].int() - expected.codes.int()
        assert apart.abs().max() <= 1
        assert apart.count_nonzero() < 0.01 * apart.numel()
        torch.testing.assert_close(state[f"{moment}_scales"].view(-1), expected.scale, rtol=1e-2, atol=0)


def test_steps_follow_adamw_to_the_error_of_the_codes():
    """Moments of the same size as the largest of their block have two digits, smaller ones fewer."""
    one, exact = torch.nn.Parameter(drawn(0)), torch.nn.Parameter(drawn(0).double())
    start = exact.detach().clone()
    steps(one, ours(one).step, 20)
    steps(exact, torch.optim.AdamW([exact], betas=(0.9, 0.98), **KEYS).step, 20)
    apart, moved = (one.double() - exact).norm(), (exact - start).norm()
    assert 0 < apart < 0.05 * moved


def test_the_first_step_is_adamws():
    """Before anything was quantized."""
    one, exact = torch.nn.Parameter(drawn(0)), torch.nn.Parameter(drawn(0).double())
    steps(one, ours(one).step, 1)
    steps(exact, torch.optim.AdamW([exact], betas=(0.9, 0.98), **KEYS).step, 1)
    torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6)


def test_pieces_change_nothing(monkeypatch):
    one, other = (torch.nn.Parameter(drawn(0)) for _ in range(2))
    steps(one, ours(one).step, 2)
    monkeypatch.setattr("slime_optimizers.adamw_8bit.PIECES", {"cpu": 1024})
    steps(other, ours(other).step, 2)
    assert torch.equal(one, other)


@pytest.mark.torchao
@pytest.mark.parametrize("signed", [True, False])
def test_codes_have_torchaos_values(signed):
    from torchao.optim.quant_utils import create_dynamic_map

    found = code_map(signed=signed, device=torch.device("cpu"))
    assert torch.equal(found.values, torch.tensor(create_dynamic_map(signed=signed)))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    """Of a block of 64; by hand: the smallest positive values are 0.55e-6 and, with a sign, the same."""
    found = code_map(signed=signed, device=torch.device("cpu"))
    assert len(found.values.unique()) == 256
    assert found.values[-1] == 1
    positive = found.values[found.values > 0]
    assert positive[0] == pytest.approx(0.55e-6 if signed else 0.325e-6)
    draw = torch.Generator().manual_seed(0)
    moment = torch.randn((3, 128), generator=draw) * torch.logspace(-4, 0, 128)
    moment = moment if signed else moment.abs()
    codes, scales = torch.zeros((3, 128), dtype=torch.uint8), torch.zeros((3, 2))
    found.encode(moment, codes, scales)
    assert torch.equal(scales, moment.view(3, 2, 64).abs().amax(-1))
    distance = (moment.view(3, 2, 64, 1) / scales[..., None, None] - found.values).abs()
    decoded = found.decoded(codes, scales)
    apart = (decoded - moment).abs() / scales.repeat_interleave(64, 1)
    torch.testing.assert_close(apart, distance.amin(-1).view(3, 128), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((2560, 9728), 256),
        ((4864, 896), 128),
        ((128, 1536, 2048), 256),
        ((64, 96), 32),
        ((64, 48), None),
        ((7, 512), None),
        ((8192, 1, 4), None),
        ((151936,), None),
    ],
)
def test_blocks_lie_in_rows_of_whole_parameters(shape, block):
    assert block_of(shape, 4096) == block
    assert block is None or shape[-1] % block == 0
