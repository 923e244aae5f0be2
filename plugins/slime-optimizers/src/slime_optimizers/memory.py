"""What the optimizers hold on a rank, for `slime plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from slime_optimizers.blocks import block_of
from slime_optimizers.config import EightBitConfig
from slime_training.memory_plan import STATE, MemoryItem, MemoryPhase, SteppedTensor

STEP = frozenset({MemoryPhase.STEP})


def of_muon(
    tensors: Sequence[SteppedTensor], num_ranks: int, place: Literal["device", "host"]
) -> tuple[MemoryItem, ...]:
    """The state is exact; whole matrices at work are an estimate, of the largest one."""
    matrices = [one for one in tensors if one.hidden]
    others = sum(one.num_elements for one in tensors if not one.hidden)
    momentum = sum(one.num_elements for one in matrices)
    return (
        MemoryItem(component="momentum", num_bytes=4 * momentum, moments=STATE, place=place),
        MemoryItem(component="first moment", num_bytes=4 * others, moments=STATE, place=place),
        MemoryItem(component="second moment", num_bytes=4 * others, moments=STATE, place=place),
        MemoryItem(
            component="a matrix at work",
            num_bytes=max((at_work(one.shape, num_ranks) for one in matrices), default=0),
            moments=STEP,
            estimate=True,
            moves=False,
            note="bfloat16",
        ),
    )


def at_work(shape: tuple[int, ...], num_ranks: int) -> int:
    """Bytes: the update, its iteration before and after, and two squares of its smaller side; with several ranks also what is
    sent, what comes back, and the shards that were sent from."""
    copies = 3 if num_ranks == 1 else 6
    return 2 * (copies * math.prod(shape) + 2 * min(shape) ** 2)


def of_8bit(
    config: EightBitConfig, tensors: Sequence[SteppedTensor], place: Literal["device", "host"]
) -> tuple[MemoryItem, ...]:
    """Exact; the largest piece that a step computes at once is an estimate, for kernels that torch has compiled."""
    size = sum(of_moment(one, block_of(one.shape, config.adamw_8bit_min_elements)) for one in tensors)
    largest = min(max((one.num_elements for one in tensors), default=0), 2**24)
    return (
        MemoryItem(component="first moment", num_bytes=size, moments=STATE, place=place, note="8 bits"),
        MemoryItem(component="second moment", num_bytes=size, moments=STATE, place=place, note="8 bits"),
        MemoryItem(
            component="a piece at work", num_bytes=8 * largest, moments=STEP, place=place, estimate=True, moves=False
        ),
    )


def of_moment(one: SteppedTensor, block: int | None) -> int:
    """Bytes of codes and scales, or of float32."""
    return 4 * one.num_elements if block is None else one.num_elements + 4 * (one.num_elements // block)
