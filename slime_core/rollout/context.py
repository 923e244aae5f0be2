"""RolloutContext: the objects that a collector uses."""

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
    """One per step."""

    config: RolloutConfig
    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    buffer: DataBuffer
    """Provides prompts, and takes back groups that were not used."""
    runner: GroupRunner | None
    """Generates groups; None: the collector needs no engine (`CollectorDriver.needs_engine`)."""
    filters: Sequence[GroupFilter]
    version: int = 0
    """Policy version that will be trained on the step's groups."""
    max_staleness: int = 0
    """Largest number of versions that a token may be older than `version`."""
    observe: Callable[[int, Sequence[SampleGroup], Sequence[tuple[SampleGroup, str]]], None]
    """Call it when the groups of a step are complete. Arguments: step, accepted groups, rejected groups with their reasons."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counters of the step by metric name; the loop logs them with the step's groups."""
    is_next: asyncio.Future[None] | None = None
    """Done when this step is the next one to train; None: it is the next one from the start."""

    def take(self, num_groups: int) -> list[BufferItem]:
        """Takes `num_groups` items: waiting ones that the buffer filter chooses for this step, then new prompts."""
        return self.buffer.get_samples(num_groups, version=self.version, max_staleness=self.max_staleness)
