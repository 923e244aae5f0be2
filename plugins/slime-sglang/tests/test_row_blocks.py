"""Products whose rows do not depend on how many there are."""

import subprocess
import sys

import pytest
import torch

from slime_sglang.server.row_blocks import add_product, multiply


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 70])
def test_products(rows):
    torch.manual_seed(rows)
    left, right, bias = torch.randn(rows, 48), torch.randn(48, 20), torch.randn(20)
    exact = (left.double() @ right.double()).float()
    assert torch.allclose(multiply(left, right), exact, atol=1e-5)
    assert torch.allclose(add_product(bias, left, right, beta=2, alpha=0.5), 2 * bias + 0.5 * exact, atol=1e-5)


def test_a_row_alone_has_the_bits_that_it_has_among_others():
    torch.manual_seed(0)
    left, right = torch.randn(100, 640), torch.randn(640, 96)
    whole = multiply(left, right)
    for count in (1, 2, 7, 33):
        assert torch.equal(multiply(left[:count], right), whole[:count])


def test_linear_layers_use_them():
    code = (
        "import torch\n"
        "from slime_sglang.server.row_blocks import use_row_blocks\n"
        "calls = []\n"
        "import slime_sglang.server.row_blocks as module\n"
        "multiply = module.multiply\n"
        "module.multiply = lambda *a: calls.append(1) or multiply(*a)\n"
        "kept = use_row_blocks()\n"
        "x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)\n"
        "with torch.inference_mode():\n"
        "    torch.nn.functional.linear(x, w); torch.nn.functional.linear(x, w, b); x[:, :3] @ w[:3]\n"
        "assert len(calls) == 3, calls\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
