"""AdamW with moments of 8 bits (Dettmers et al. 2021, arXiv 2110.02861), with the codes of torchao.

A moment is a code of one byte per element, and a float32 scale for each block of up to 256 elements. Blocks lie inside rows, so
that ranks which hold rows of a parameter have the blocks of the whole one; in torchao, which divides what a rank holds, the
number of ranks decides what is quantized. Codes and scales are plain tensors, which checkpoints and sleep know. A step
computes in float32.

Legend: N rows of a piece, C elements of a row, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from slime_core.contracts.optimizer import OptimizerConfig
from slime_optimizers.blocks import block_of
from slime_optimizers.byte_codes import CodeMap, code_map
from slime_optimizers.config import EightBitConfig
from slime_training.rounded_adamw import local, step_groups, update

PIECES: Final = {"cpu": 2**20, "cuda": 2**24}
"""Elements that are computed at once."""
SUFFIXES: Final = ("codes", "scales")


class EightBitAdamW(torch.optim.Optimizer):
    """Parameters are float32, whole tensors or shards of rows."""

    def __init__(self, groups: Sequence[dict[str, Any]], config: OptimizerConfig, options: EightBitConfig) -> None:
        betas = (config.adam_beta1, config.adam_beta2)
        super().__init__(
            groups, {"lr": config.lr, "betas": betas, "eps": config.adam_eps, "weight_decay": config.weight_decay}
        )
        self._options = options

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns `step` (float32, on the host), and of each moment codes (uint8, of the parameter's shape) and scales
        (float32, B in place of the last dimension), or of a small parameter the moment itself; creates them if no step has."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            block = block_of(tuple(parameter.shape), self._options.adamw_8bit_min_elements)
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in ("exp_avg", "exp_avg_sq"):
                if block is None:
                    state[moment] = torch.zeros_like(parameter)
                    continue
                state[f"{moment}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                # Sharded as the parameter.
                first_of_blocks = parameter.detach()[..., : parameter.shape[-1] // block]
                state[f"{moment}_scales"] = torch.zeros_like(first_of_blocks, memory_format=torch.contiguous_format)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        step_groups(self.param_groups, self.state_of, step_on)
        return loss


def step_on(parameter: Tensor, state: dict[str, Tensor], numbers: Tensor, salts: Tensor) -> None:
    """`numbers`, `salts`: of `update`."""
    weight, gradient = rows(parameter), rows(parameter.grad)
    if "exp_avg" in state:
        update(weight, gradient, rows(state["exp_avg"]), rows(state["exp_avg_sq"]), numbers, salts)
        return
    mean_codes, mean_scales, square_codes, square_scales = (
        rows(state[f"{moment}_{suffix}"]) for moment in ("exp_avg", "exp_avg_sq") for suffix in SUFFIXES
    )
    signed, unsigned = (code_map(signed=signed, device=weight.device) for signed in (True, False))
    compute = compiled_update() if weight.is_cuda else update_quantized
    size = max(PIECES["cuda" if weight.is_cuda else "cpu"] // weight.shape[1], 1)
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        compute(
            weight[part],
            gradient[part],
            mean_codes[part],
            mean_scales[part],
            square_codes[part],
            square_scales[part],
            signed,
            unsigned,
            numbers,
            salts,
        )


def update_quantized(
    weight: Tensor,
    gradient: Tensor,
    mean_codes: Tensor,
    mean_scales: Tensor,
    square_codes: Tensor,
    square_scales: Tensor,
    signed: CodeMap,
    unsigned: CodeMap,
    numbers: Tensor,
    salts: Tensor,
) -> None:
    """Updates in place: weight and codes (N, C), scales (N, B)."""
    mean = signed.decoded(mean_codes, mean_scales)
    square = unsigned.decoded(square_codes, square_scales)
    update(weight, gradient, mean, square, numbers, salts)
    signed.encode(mean, mean_codes, mean_scales)
    unsigned.encode(square, square_codes, square_scales)


@cache
def compiled_update() -> Callable[..., None]:
    return torch.compile(update_quantized, dynamic=True)


def rows(tensor: Tensor | None) -> Tensor:
    """Returns this rank's part as a view, of two dimensions; a vector is one row."""
    assert tensor is not None
    return local(tensor).view(-1, tensor.shape[-1] if tensor.ndim > 1 else local(tensor).shape[0])
