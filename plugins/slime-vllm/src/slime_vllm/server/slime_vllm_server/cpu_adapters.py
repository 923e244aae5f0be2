"""Adapters on a CPU. vLLM numbers the rows of requests without an adapter -1, and its operations for CPUs then read the last
adapter: such a request got its matrices, beside others that name one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform

SHRINK = "bgmv_shrink"
"""Computes s A x, of which the next operation adds B (s A x)."""


def leave_rows_alone() -> None:
    """In this process, from now on: rows without an adapter get 0. On GPUs nothing changes, whose kernels leave them out."""
    if current_platform.is_cpu() and not isinstance(lora_ops.bgmv_shrink, partial):
        fixed = partial(shrink, lora_ops.bgmv_shrink)
        setattr(lora_ops, SHRINK, fixed)
        setattr(punica_cpu, SHRINK, fixed)


def shrink(
    original: Callable[..., None],
    inputs: Tensor,
    weights: Tensor,
    output: Tensor,
    adapters: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """adapters: of each row."""
    original(inputs, weights, output, adapters, *args, **kwargs)
    output[: len(adapters)].masked_fill_((adapters < 0)[: len(output), None], 0)
