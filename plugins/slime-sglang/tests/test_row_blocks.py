"""Products whose rows do not depend on how many there are."""

import subprocess
import sys


def test_linear_layers_use_them():
    code = (
        "import torch\n"
        "import slime_training.batch_invariant.products as products\n"
        "import slime_sglang.server.row_blocks as module\n"
        "calls = []\n"
        "multiply = products.multiply\n"
        "products.multiply = module.multiply = lambda *a: calls.append(1) or multiply(*a)\n"
        "kept = module.use_row_blocks()\n"
        "x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)\n"
        "with torch.inference_mode():\n"
        "    torch.nn.functional.linear(x, w); torch.nn.functional.linear(x, w, b); x[:, :3] @ w[:3]\n"
        "assert len(calls) == 3, calls\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
