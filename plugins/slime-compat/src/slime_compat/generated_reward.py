"""The reward of a run whose generate function scores its samples itself. The kernel keeps rewards that samples have."""

from __future__ import annotations

from typing import Any, Final, NoReturn

PATH: Final = f"{__name__}.reward"


async def reward(args: Any, sample: Any) -> NoReturn:
    """Called for samples without a reward alone."""
    raise ValueError(
        "the generate function set no sample.reward, and the launch line names no reward: set it there, or set the reward "
        "of the run file"
    )
