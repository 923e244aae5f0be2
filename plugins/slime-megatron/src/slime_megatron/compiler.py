"""Megatron decorates small functions with torch.compile when it is imported: on a CPU each would start a C++ compiler at its
first call, without benefit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    # The package of the switch imports decorated functions itself, such as those of routers.
    compiled, torch.compile = torch.compile, uncompiled  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiled

    jit.disable_jit_fuser()
    yield


def uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """In place of torch.compile, with arguments or as a decorator without."""
    return function if function is not None else lambda decorated: decorated
