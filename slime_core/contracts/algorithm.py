"""Recipe: an algorithm as data. It names its parts and sets their options; an algorithm has no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core import API_VERSION
from slime_core.contracts.aggregation import Aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The algorithm that `--algo NAME` chooses. Every field can be overridden by the same key in the run file's `algo` table.

    `options` are defaults for the options of the parts (`eps_clip_high`, `std`, …) and for the kernel's own algorithm
    keys (`kl_loss_coef`, `normalize_advantages`, …); the run file overrides them.
    """

    summary: str
    """One line: how the algorithm differs from its nearest relative."""
    paper: str
    """Title and arXiv number or equivalent."""
    relative: str | None = None
    """Name of the most similar algorithm; None: there is none."""
    differences: tuple[str, ...] = ()
    """Differences from `relative`, one phrase each, for the documentation."""
    formula: str = ""
    """Plain-text formula of the objective."""
    advantage: str | None
    """Entry point in slime.advantages; None: the loss uses no advantages."""
    loss: str
    """Entry point in slime.losses."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN
    shaping: tuple[str, ...] = ()
    """Reward shapers (slime.advantages), in the order in which they run."""
    corrections: tuple[str, ...] = ()
    """Off-policy corrections (slime.corrections); their weights are multiplied."""
    filters: tuple[str, ...] = ()
    """Group filters that the recipe adds before the run file's own."""
    roles: tuple[str, ...] = ()
    """Trained roles beside the actor, such as `critic`."""
    collector: str | None = None
    """Collector to use unless the run file sets rollout.collector; None: `accepted`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    api_version: int = API_VERSION
