"""Megatron decorates small functions with torch.compile when it is imported: on a CPU each would start a C++ compiler at its
first call, without benefit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slime_megatron.known_warnings import silence_known_warnings


@contextmanager
def no_compiler() -> Iterator[None]:
    """Sets Megatron's own switch around its first import. Has no effect with CUDA."""
    silence_known_warnings()
    if torch.cuda.is_available():
        yield
        return
    # transformers builds rotary frequencies with torch's factories: it is imported before anything that rebinds them.
    import transformers.modeling_utils  # noqa: F401
    from megatron.core import jit

    jit.disable_jit_fuser()
    yield
