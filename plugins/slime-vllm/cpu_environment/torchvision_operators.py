"""Lets `import torchvision` work with the torch for CPUs. PyPI's wheel of torchvision has its operators in a library that needs
CUDA; without it the package cannot be imported, because it registers shape functions of two operators that do not exist then.
The transforms, which are all that vLLM uses, need none.

`torchvision_operators.pth` imports this in every process of the environment.
"""

import sys
from importlib.abc import MetaPathFinder


class BeforeTorchvision(MetaPathFinder):
    """Declares the operators just before the package is imported, and finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


sys.meta_path.insert(0, BeforeTorchvision())
