"""BoundRole: a model that a run trains, a row of the table of roles.

The first role is the policy: its weights go to the engines. Roles are scored in the table's order and trained in the
opposite one: the role that was scored last is trained first, so that shared devices switch roles as rarely as possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from slime_core.config.part import BoundPlugin
from slime_core.contracts.backend import ACTOR, REFERENCE, TEACHER
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig
from slime_core.contracts.setup import RoutingReplay

POLICY: Final = "actor"

LOSS_KEYS: Final[Mapping[str, str]] = {"critic": "critic_loss"}
"""Roles that a recipe may ask for beside the policy, each with the key of the algo table that names its loss."""

FROZEN_MODEL_KEYS: Final[Mapping[str, str]] = {REFERENCE: "model.ref_load", TEACHER: "model.opd_teacher_load"}
"""Frozen copies, each with the key that names its folder."""

CREDIT_COLUMNS: Final = frozenset({"advantages", "returns", "loss_weight"})
"""Columns that every loss gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A forward over the whole batch, without gradient, that fills a column."""

    column: Need
    output: Literal["log_probs", "values"]
    """The backend's output that it reads."""
    weights: str = ACTOR
    """The trained weights, or one of the role's frozen copies."""
    by_others: bool = False
    """Read by the advantages or by another role: computed also in steps that do not train this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What a role computes for a rollout batch."""

    name: str
    metric_prefix: str = ""
    """Prefix of the names of its train metrics."""
    idle_steps: int = 0
    """Rollout steps at the start of the run that do not train it."""
    scoring: tuple[Scoring, ...] = ()
    columns: frozenset[str] = CREDIT_COLUMNS
    """Columns of `TokenColumns` that its loss gets."""
    corrected: bool = False
    """Off-policy corrections weigh its loss."""
    routing_replay: RoutingReplay | None = None
    """The source of the expert choices that it is trained with; None: its own forward."""
    updated_frozen_models: tuple[str, ...] = ()
    """Frozen copies that `train.ref_update_interval` updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The terms of an objective beside the loss itself."""

    kl: BoundPlugin | None = None
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    corrections: tuple[BoundPlugin, ...] = ()
    """Corrections of the loss stage."""
    old_from_current: bool = False
    old_from_rollout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRole:
    """A model that is trained, with its plugins and ranks."""

    plan: RolePlan
    head: Literal["lm", "value"]
    loss: BoundPlugin
    terms: LossTerms = field(default_factory=LossTerms)
    needs: frozenset[Need]
    """The columns and scores that its backend has to provide."""
    backend: BoundPlugin
    model_path: Path
    """Hugging Face folder that it starts from."""
    optimizer: OptimizerConfig
    optimizer_part: BoundPlugin
    frozen_models: Mapping[str, Path] = field(default_factory=dict)
    """Frozen weights beside the trained ones: name to Hugging Face folder."""
    num_ranks: int
    ranks_per_node: int
    own_devices: bool = False
    """Off: rank r shares the device of the policy's rank r."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def chosen_optimizer(self) -> ChosenOptimizer:
        return ChosenOptimizer(driver=self.optimizer_part.driver, options=self.optimizer_part.config)


def count_ranks(backend: BoundPlugin, num_nodes: int, per_node: int | None) -> int:
    """Ranks of a role; the fewest that the layout needs if `per_node` is None."""
    if per_node is None:
        return max(num_nodes, int(backend.driver.min_world_size(backend.config)))
    return num_nodes * per_node
