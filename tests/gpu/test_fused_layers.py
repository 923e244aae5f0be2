"""slime-megatron's norm and rotation, one kernel each on a GPU, against the formulas in float32.

Needs megatron-core and slime-megatron: `pytest tests/gpu/test_fused_layers.py`.
"""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def assert_near(found, exact):
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        # The rounded output is raised to the third power.
        assert (one.float() - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_the_formula(interleaved):
    from slime_megatron.bridges.bridge import Rotary
    from slime_megatron.rope import RotaryCache

    torch.manual_seed(0)
    rotary = Rotary(inv_freq=1e4 ** -torch.linspace(0, 1, 17)[:-1])
    for tokens in (300, 7, 513):
        positions = torch.randint(0, 5000, (tokens,), device=DEVICE)
        # Slices of one projection: rows of keys are not contiguous.
        both = drawn(tokens, 6, 64)
        q, k = both[:, :4], both[:, 4:]
        found = RotaryCache.at(positions, rotary).apply_rotary(q, k, interleaved=interleaved)
        given = torch.autograd.grad(sum((x.float() ** 3).sum() for x in found), both)

        wide = both.detach().float().requires_grad_()
        angles = positions.double()[:, None] * rotary.inv_freq.to(DEVICE).double()
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
        rotary_part = wide[..., :32].unflatten(-1, (16, 2) if interleaved else (2, 16))
        rotary_part = rotary_part if interleaved else rotary_part.mT
        pairs = torch.view_as_real(torch.view_as_complex(rotary_part.contiguous()) * turn)
        # For both layouts: first the real parts of all pairs, then the imaginary ones.
        exact = torch.cat([pairs[..., 0], pairs[..., 1], wide[..., 32:]], dim=-1)
        assert_near(found, (exact[:, :4], exact[:, 4:]))
        assert_near(given, torch.autograd.grad((exact**3).sum(), wide))


@pytest.mark.parametrize("around_one", [False, True])
def test_norm_is_the_formula(around_one):
    from slime_megatron.layers import RmsNorm

    torch.manual_seed(0)
    config = SimpleNamespace(
        params_dtype=torch.bfloat16, sequence_parallel=False, layernorm_zero_centered_gamma=around_one
    )
    for shape in ((300, 1, 256), (7, 1, 256), (300, 1, 4, 64), (513, 1, 2, 64)):
        norm = RmsNorm(config, shape[-1], eps=1e-6).to(DEVICE)
        torch.nn.init.normal_(norm.weight, mean=0.0 if around_one else 1.0, std=0.3)
        x = drawn(*shape)
        out = norm(x)
        given = torch.autograd.grad((out.float() ** 3).sum(), (x, norm.weight))

        wide, weight = x.detach().float().requires_grad_(), norm.weight.detach().float().requires_grad_()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + 1 if around_one else weight)
        assert_near((out,), (exact,))
        assert_near(given, torch.autograd.grad((exact**3).sum(), (wide, weight)))
