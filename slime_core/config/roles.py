"""The models that a run trains: a table with a row for each role, which everything else walks.

The first role is the policy: its weights go to the engines. Roles are scored in the table's order and trained in the
opposite one, so that a role that was scored last is trained first and shared devices change hands as rarely as can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from slime_core.config.train import OptimizerConfig
from slime_core.contracts.backend import ACTOR, REFERENCE, TEACHER, RoutingReplay
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    from slime_core.config.bound import BoundRun, Part

LOSS_KEYS: Final[Mapping[str, str]] = {"critic": "critic_loss"}
"""Roles that a recipe may ask for beside the policy, each with the key of the algo table that names its loss."""

COPY_KEYS: Final[Mapping[str, str]] = {REFERENCE: "model.ref_load", TEACHER: "model.opd_teacher_load"}
"""Frozen copies, each with the key that names its folder."""

CREDIT_COLUMNS: Final = frozenset({"advantages", "returns", "loss_weight"})
"""What every loss is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A forward over the whole batch, without gradient, that fills a column."""

    column: Need
    output: Literal["log_probs", "values"]
    """Which of the backend's scores it is."""
    weights: str = ACTOR
    """The trained weights, or one of the role's frozen copies."""
    by_others: bool = False
    """Read by the advantages or by another role: wanted also in steps that do not train this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What a rollout batch asks of a role."""

    name: str
    metric_prefix: str = ""
    """Before the names of its train metrics."""
    idle_steps: int = 0
    """Rollout steps at the start of the run that do not train it."""
    scoring: tuple[Scoring, ...] = ()
    columns: frozenset[str] = CREDIT_COLUMNS
    """Of `TokenColumns`: what its loss gets to see."""
    corrected: bool = False
    """Off-policy corrections weigh its loss."""
    routing_replay: RoutingReplay | None = None
    """Whose choice of experts it is trained with."""
    refreshed_copies: tuple[str, ...] = ()
    """Frozen copies that `train.ref_update_interval` brings up to date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What stands in an objective beside the loss itself."""

    kl: Part | None = None
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    corrections: tuple[Part, ...] = ()
    """Those of the loss stage."""
    old_from_current: bool = False
    old_from_rollout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRole:
    """A model that is trained, and where."""

    plan: RolePlan
    head: Literal["lm", "value"]
    loss: Part
    terms: LossTerms = field(default_factory=LossTerms)
    needs: frozenset[Need]
    """What its backend has to provide."""
    backend: Part
    model_path: Path
    """Hugging Face folder that it starts from."""
    optimizer: OptimizerConfig
    copies: Mapping[str, Path] = field(default_factory=dict)
    """Frozen weights beside the trained ones: name to Hugging Face folder."""
    num_ranks: int
    ranks_per_node: int
    own_devices: bool = False
    """Off: rank r stands on the device of the policy's rank r."""

    @property
    def name(self) -> str:
        return self.plan.name


def trained_roles(run: BoundRun) -> tuple[BoundRole, ...]:
    """The table."""
    if run.algo.critic_loss is None:
        return (actor(run),)
    return (actor(run), critic(run, run.algo.critic_loss))


def actor(run: BoundRun) -> BoundRole:
    """The policy: the recipe's loss with its KL, entropy and correction terms."""
    algo, keys, model = run.algo, run.algo.keys, run.config.model
    others = algo.credit_needs | algo.critic_needs
    # Recorded choices are those of that forward.
    recorded = run.routing_replay is RoutingReplay.RECORDED
    old_is_current = algo.old_is_current(run.steps_per_rollout) and not recorded
    old_from_rollout = algo.old_from_rollout(run.steps_per_rollout)
    reads_old = Need.OLD_LOGPROBS in algo.needs and not old_from_rollout
    wants_reference = Need.REF_LOGPROBS in algo.needs
    scoring = []
    # Mismatch metrics compare the trainer's own, also where the loss takes the engine's for the old ones.
    if (reads_old and not old_is_current) or keys.get_mismatch_metrics:
        column = Need.OLD_LOGPROBS
        scoring.append(Scoring(column=column, output="log_probs", by_others=reads_old and column in others))
    if wants_reference:
        column = Need.REF_LOGPROBS
        scoring.append(Scoring(column=column, output="log_probs", weights=REFERENCE, by_others=column in others))
    if Need.TEACHER_LOGPROBS in algo.needs and run.teacher is None:
        column = Need.TEACHER_LOGPROBS
        scoring.append(Scoring(column=column, output="log_probs", weights=TEACHER, by_others=column in others))
    given = {Need.OLD_LOGPROBS, Need.REF_LOGPROBS, Need.TEACHER_LOGPROBS, Need.ENTROPY, *algo.loss_needs}
    copies = {REFERENCE: Path(model.ref_load or model.hf_checkpoint)} if wants_reference else {}
    refreshed = tuple(copies)
    if Need.TEACHER_LOGPROBS in algo.needs and model.opd_teacher_load is not None:
        copies[TEACHER] = Path(model.opd_teacher_load)
    return BoundRole(
        plan=RolePlan(
            name="actor",
            idle_steps=keys.num_critic_only_steps,
            scoring=tuple(scoring),
            columns=CREDIT_COLUMNS | {need.value for need in given} | {"correction"},
            corrected=True,
            routing_replay=run.routing_replay,
            refreshed_copies=refreshed,
        ),
        head="lm",
        loss=algo.loss,
        terms=LossTerms(
            kl=algo.kl_loss,
            kl_loss_coef=keys.kl_loss_coef,
            use_unbiased_kl=keys.use_unbiased_kl,
            entropy_coef=keys.entropy_coef,
            corrections=tuple(part for part in algo.corrections if part.driver.in_loss),
            old_from_current=old_is_current,
            old_from_rollout=old_from_rollout,
        ),
        needs=algo.needs - {Need.ROLLOUT_LOGPROBS, Need.VALUES} - ({Need.TEACHER_LOGPROBS} if run.teacher else set()),
        backend=run.backend,
        model_path=Path(model.hf_checkpoint),
        optimizer=run.config.train.optimizer_config(),
        copies=copies,
        num_ranks=run.num_ranks,
        ranks_per_node=run.config.launcher.actor_num_gpus_per_node or run.num_ranks,
    )


def critic(run: BoundRun, loss: Part) -> BoundRole:
    """Values of the states in which each response token was chosen. Its loss stands alone: no KL, entropy or
    correction."""
    settings, launcher = run.config.roles.critic, run.config.launcher
    backend = run.role_backends.get("critic", run.backend)
    own_devices = launcher.critic_num_nodes is not None or launcher.critic_num_gpus_per_node is not None
    num_ranks, ranks_per_node = run.num_ranks, launcher.actor_num_gpus_per_node
    if own_devices:
        ranks_per_node = launcher.critic_num_gpus_per_node
        num_ranks = count_ranks(backend, launcher.critic_num_nodes or 1, ranks_per_node)
    return BoundRole(
        plan=RolePlan(
            name="critic",
            metric_prefix="critic-",
            scoring=(Scoring(column=Need.VALUES, output="values", by_others=True),),
            columns=CREDIT_COLUMNS | {need.value for need in run.algo.critic_needs},
        ),
        head="value",
        loss=loss,
        needs=frozenset({Need.VALUES}),
        backend=backend,
        model_path=Path(settings.load or run.config.model.hf_checkpoint),
        optimizer=settings.optimizer_config(run.config.train),
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node or num_ranks,
        own_devices=own_devices,
    )


def count_ranks(backend: Part, num_nodes: int, per_node: int | None) -> int:
    """Ranks of a role; as many as the layout needs at least, if nothing is said of a machine's."""
    if per_node is None:
        return max(num_nodes, int(backend.driver.least_ranks(backend.config)))
    return num_nodes * per_node
