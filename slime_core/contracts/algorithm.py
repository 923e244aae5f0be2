"""Recipe: an algorithm as data. It names its parts and gives their options; there is no code in an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core import API_VERSION
from slime_core.contracts.aggregation import Aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What `--algo NAME` means. Every field can be overridden by the same key in the run file's `algo` table.

    `options` are defaults for the options of the parts (`eps_clip_high`, `std`, …) and for the kernel's own algorithm
    keys (`kl_loss_coef`, `normalize_advantages`, …); the table of the run file wins over them.
    """

    summary: str
    """One line: what the algorithm is, as a difference from its nearest relative."""
    paper: str
    """Title and arXiv number or equivalent."""
    relative: str | None = None
    """The algorithm it differs least from."""
    differences: tuple[str, ...] = ()
    formula: str = ""
    """Plain-text formula of the objective."""
    advantage: str | None
    """None: the loss uses no advantages."""
    loss: str
    aggregation: Aggregation = Aggregation.SEQ_MEAN
    shaping: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    """Group filters that the recipe adds before the run file's own."""
    roles: tuple[str, ...] = ()
    """Further trained roles, such as a critic."""
    collector: str | None = None
    """How groups come together, unless the run file says; None: as the kernel does it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    api_version: int = API_VERSION
