"""The models that a run trains: the policy, and the roles that its recipe asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slime_core.config.bound import BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.config.roles import CREDIT_COLUMNS, POLICY, BoundRole, LossTerms, RolePlan, Scoring, count_ranks
from slime_core.contracts.backend import REFERENCE, TEACHER
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import RoutingReplay


def with_roles(run: BoundRun) -> BoundRun:
    """`run` with its table of roles."""
    critic_loss = run.algo.critic_loss
    return replace(run, roles=(actor(run), *(() if critic_loss is None else (critic(run, critic_loss),))))


def actor(run: BoundRun) -> BoundRole:
    """The policy: the recipe's loss with its KL, entropy and correction terms."""
    algo, keys, model = run.algo, run.algo.keys, run.config.model
    others = algo.credit_needs | algo.critic_needs
    # Expert choices are recorded in that forward.
    recorded = run.routing_replay is RoutingReplay.RECORDED
    old_is_current = algo.old_is_current(run.steps_per_rollout) and not recorded
    old_from_rollout = algo.old_from_rollout(run.steps_per_rollout)
    reads_old = Need.OLD_LOGPROBS in algo.needs and not old_from_rollout
    needs_reference = Need.REF_LOGPROBS in algo.needs
    scoring = []
    # Mismatch metrics compare with the trainer's log-probs, also where the loss uses the engine's as the old ones.
    if (reads_old and not old_is_current) or keys.get_mismatch_metrics:
        column = Need.OLD_LOGPROBS
        scoring.append(Scoring(column=column, output="log_probs", by_others=reads_old and column in others))
    if needs_reference:
        column = Need.REF_LOGPROBS
        scoring.append(Scoring(column=column, output="log_probs", weights=REFERENCE, by_others=column in others))
    if Need.TEACHER_LOGPROBS in algo.needs and run.teacher is None:
        column = Need.TEACHER_LOGPROBS
        scoring.append(Scoring(column=column, output="log_probs", weights=TEACHER, by_others=column in others))
    given = {Need.OLD_LOGPROBS, Need.REF_LOGPROBS, Need.TEACHER_LOGPROBS, Need.ENTROPY, *algo.loss_needs}
    frozen_models = {REFERENCE: Path(model.ref_load or model.hf_checkpoint)} if needs_reference else {}
    refreshed = tuple(frozen_models)
    if Need.TEACHER_LOGPROBS in algo.needs and model.opd_teacher_load is not None:
        frozen_models[TEACHER] = Path(model.opd_teacher_load)
    return BoundRole(
        plan=RolePlan(
            name=POLICY,
            idle_steps=keys.num_critic_only_steps,
            scoring=tuple(scoring),
            columns=CREDIT_COLUMNS | {need.value for need in given} | {"correction"},
            corrected=True,
            routing_replay=run.routing_replay,
            updated_frozen_models=refreshed,
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
        optimizer=named(run.config.train.optimizer_config(), run.optimizers[POLICY]),
        optimizer_part=run.optimizers[POLICY],
        frozen_models=frozen_models,
        num_ranks=run.num_ranks,
        ranks_per_node=run.config.launcher.actor_num_gpus_per_node or run.num_ranks,
    )


def critic(run: BoundRun, loss: BoundPlugin) -> BoundRole:
    """The critic: it learns the value of the state in which each response token was chosen. Its objective has no KL, entropy
    or correction terms."""
    settings, launcher = run.config.roles.critic, run.config.launcher
    backend = run.role_backends.get("critic", run.backend)
    optimizer = run.optimizers.get("critic", run.optimizers[POLICY])
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
        optimizer=named(settings.optimizer_config(run.config.train.optimizer_config()), optimizer),
        optimizer_part=optimizer,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node or num_ranks,
        own_devices=own_devices,
    )


def named(config: OptimizerConfig, part: BoundPlugin) -> OptimizerConfig:
    """`config` with the plugin's name alone where the user wrote DISTRIBUTION/NAME."""
    return config.model_copy(update={"optimizer": part.entry.name})
