"""RolloutContext: what a collector works with."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_core.config.rollout import RolloutConfig
from slime_core.config.run import DataConfig
from slime_core.contracts.filter import GroupFilter
from slime_core.data.buffer import DataBuffer
from slime_core.rollout.groups import GroupRunner
from slime_core.types.buffer_item import BufferItem
from slime_core.types.sample import SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """One per step. `runner` starts groups, `buffer` gives prompts and takes back what was not used."""

    config: RolloutConfig
    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    buffer: DataBuffer
    runner: GroupRunner | None
    """None: the collector's driver said that it needs no engine."""
    filters: Sequence[GroupFilter]
    version: int = 0
    """Of the policy that will be trained on the step's groups."""
    max_staleness: int = 0
    """Versions that a token may be behind that one."""
    observe: Callable[[int, Sequence[SampleGroup], Sequence[tuple[SampleGroup, str]]], None]
    """Called once a step's groups are complete: the step, the accepted groups, the refused ones with the reason."""
    counts: Counter[str] = field(default_factory=Counter)
    """Metric names to counts of the current step; the loop takes them with the step's groups."""
    wanted: asyncio.Future[None] | None = None
    """Done when the step is the next to be trained; None: it is from the beginning."""

    def take(self, num_groups: int) -> list[BufferItem]:
        """What is generated from next: as the buffer filter chooses for this step, then new prompts."""
        return self.buffer.get_samples(num_groups, version=self.version, max_staleness=self.max_staleness)
