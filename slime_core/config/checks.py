"""Cross-checks: what does not fit between tables and plugins. They compare declared sets, never names."""

from __future__ import annotations

import json
from collections.abc import Callable

from slime_core.config.bound import BoundRun
from slime_core.config.engine_checks import (
    colocation,
    engine_layouts,
    engines_over_nodes,
    media,
    penalties,
    reward_model,
    routing_replay,
    transport,
)
from slime_core.config.role_checks import (
    asked_roles,
    losses_of_roles,
    needs,
    optimizers,
    settings_without_role,
    teacher,
)
from slime_core.contracts.engine import Capability
from slime_core.contracts.needs import Need


def cross_checks(run: BoundRun) -> list[str]:
    """Every problem, as sentences that say what was asked and what to type."""
    checks: tuple[Callable[[BoundRun], list[str]], ...] = (
        batch_arithmetic,
        run_length,
        asynchrony,
        true_on_policy,
        group_baseline,
        kl_terms,
        advantages,
        collector,
        rewards,
        reward_model,
        debug_parts,
        teacher,
        asked_roles,
        settings_without_role,
        losses_of_roles,
        needs,
        optimizers,
        corrections,
        sampling,
        penalties,
        routing_replay,
        transport,
        colocation,
        engines_over_nodes,
        engine_layouts,
        media,
        saved_aside,
    )
    # The layout comes last: a backend that looks at the model may import what takes seconds.
    return [problem for check in checks for problem in check(run)] or [*launcher(run), *layout(run)]


def batch_arithmetic(run: BoundRun) -> list[str]:
    rollout, train = run.config.rollout, run.config.train
    total, size, steps = run.rollouts_per_batch, train.global_batch_size, train.num_steps_per_rollout
    product = f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt {rollout.n_samples_per_prompt} = {total}"
    problems = []
    if size is not None and steps is not None and size * steps != total:
        problems.append(
            f"{product}, but global_batch_size {size} x num_steps_per_rollout {steps} = {size * steps}. "
            "Give only one of the two, or make the products equal."
        )
    elif size is not None and total % size:
        problems.append(
            f"{product} is not a multiple of global_batch_size {size}. Nearest that fit: {nearest(total, size)}."
        )
    elif size is None and steps is not None and total % steps:
        problems.append(
            f"{product} does not divide by num_steps_per_rollout {steps}. Nearest that fit: {nearest(total, steps)}."
        )
    wave = rollout.over_sampling_batch_size
    if wave is not None and wave < rollout.rollout_batch_size:
        problems.append(
            f"over_sampling_batch_size {wave} is smaller than rollout_batch_size {rollout.rollout_batch_size}: "
            f"say {rollout.rollout_batch_size} or more, or leave it out."
        )
    return problems


def nearest(total: int, asked: int) -> str:
    """The divisors of `total` next to `asked`."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = max((d for d in divisors if d < asked), default=None)
    above = min((d for d in divisors if d > asked), default=None)
    return " and ".join(str(d) for d in (below, above) if d is not None)


def run_length(run: BoundRun) -> list[str]:
    train = run.config.train
    if (train.num_rollout is None) == (train.num_epoch is None):
        return ["train: give num_rollout (rollout steps) or num_epoch (passes over the data), exactly one of them."]
    return []


def asynchrony(run: BoundRun) -> list[str]:
    rollout, interval = run.config.rollout, run.config.sync.update_weights_interval
    worst, allowed = run.least_staleness, run.max_staleness
    problems = []
    if allowed < worst:
        problems.append(
            f"rollout.max_staleness = {allowed}, but rollouts {rollout.ahead} step(s) ahead with update_weights_interval "
            f"{interval} are up to {worst} version(s) behind: say --max-staleness {worst} or more."
        )
    if rollout.partial_rollout and allowed == 0:
        problems.append(
            "rollout.partial_rollout = true: an answer that goes on in a later step has tokens of an older policy, and "
            "max_staleness is 0. Say --max-staleness with the number of steps that an answer may take beyond its first."
        )
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        problems.append(
            "rollout.mask_offpolicy_in_partial_rollout = true: nothing is broken off without --partial-rollout. For "
            "rollouts that run ahead there is --on-stale mask_old_spans."
        )
    if rollout.in_flight and rollout.ahead == 0:
        problems.append(
            "rollout.update_weights_in_flight = true: with ahead = 0 nothing runs while weights are published. Say "
            "--ahead 1 or more."
        )
    if rollout.in_flight and Capability.VERSION_SPANS not in run.engine.driver.may_offer:
        problems.append(
            f'rollout.update_weights_in_flight = true: engine "{run.engine.name}" does not say which policy wrote which '
            "tokens of an answer. Say --no-update-weights-in-flight."
        )
    if rollout.partial_rollout and not run.collector.driver.across_steps:
        problems.append(
            f'rollout.partial_rollout = true: collector "{run.collector.name}" begins every step anew. Leave '
            "--rollout.collector out."
        )
    return problems


def true_on_policy(run: BoundRun) -> list[str]:
    if not run.algo.keys.true_on_policy_mode:
        return []
    asked, problems = "algo.true_on_policy_mode = true:", []
    if Capability.TRUE_ON_POLICY not in run.engine.driver.may_offer:
        problems.append(f'{asked} engine "{run.engine.name}" computes with kernels of its own. Choose another engine.')
    problems += [
        f'{asked} backend "{run.backend.name}": {problem}.'
        for problem in run.backend.driver.true_on_policy_problems(run.backend.config)
    ]
    rollout, sync = run.config.rollout, run.config.sync
    older = {
        "rollout.ahead": (rollout.ahead, 0),
        "sync.update_weights_interval": (sync.update_weights_interval, 1),
        "rollout.partial_rollout": (rollout.partial_rollout, False),
    }
    problems += [
        f"{asked} with {key} = {str(value).lower()} tokens are sampled from an older policy than the one that is trained. "
        f"Use {str(needed).lower()}."
        for key, (value, needed) in older.items()
        if value != needed
    ]
    return problems


def group_baseline(run: BoundRun) -> list[str]:
    n, estimators = run.config.rollout.n_samples_per_prompt, run.algo.estimators
    if n == 1 and estimators and all(part.driver.compares_group(part.config) for part in estimators):
        return [
            f'rollout.n_samples_per_prompt = 1, but advantage "{estimators[0].name}" compares the samples of one '
            "prompt, so every advantage would be 0: say --n-samples-per-prompt 2 or more."
        ]
    return []


def kl_terms(run: BoundRun) -> list[str]:
    keys, problems = run.algo.keys, []
    if keys.kl_coef and keys.kl_loss_coef:
        problems.append(
            f"algo.kl_coef = {keys.kl_coef} and algo.kl_loss_coef = {keys.kl_loss_coef}: the KL goes into the reward or "
            "into the loss, not both. Set one of them to 0."
        )
    if keys.kl_coef and not (run.algo.advantage and run.algo.advantage.driver.accepts_kl_penalty):
        name = "none" if run.algo.advantage is None else run.algo.advantage.name
        problems.append(
            f'algo.kl_coef = {keys.kl_coef}: advantage "{name}" takes no KL in the reward. Use --kl-loss-coef.'
        )
    return problems


def advantages(run: BoundRun) -> list[str]:
    algo = run.algo
    if algo.loss.driver.uses_advantages:
        if algo.advantage is None:
            return [f'algo.advantage: loss "{algo.loss.name}" uses advantages. Say --algo.advantage NAME.']
        return []
    if algo.advantage_terms:
        return [f'algo.advantage_terms: loss "{algo.loss.name}" uses no advantages. Leave them out.']
    return []


def collector(run: BoundRun) -> list[str]:
    return list(run.collector.driver.problems(run.collector.config, run.config.rollout))


def rewards(run: BoundRun) -> list[str]:
    if not run.rewards and run.algo.uses_rewards and not run.generate.driver.gives_rewards:
        return [
            f'reward: algorithm "{run.algo.name}" needs one, for example --reward NAME. `slime plugins` lists them.'
        ]
    deaf = [part.name for part in run.algo.estimators if part.driver.uses_rewards and not part.driver.accepts_spans]
    return [
        f'{reward.part.where}: "{reward.label}" rewards spans of a response, and advantage "{deaf[0]}" gives all tokens of '
        "one the same credit. Choose one that credits tokens one by one (its driver says accepts_spans), or another reward."
        for reward in run.rewards
        if reward.part.driver.gives_spans and deaf
    ]


def debug_parts(run: BoundRun) -> list[str]:
    """Half a run, or one that is fed from a file."""
    rollout, train, problems = run.config.rollout, run.config.train, []
    if rollout.debug_rollout_only and (train.debug_train_only or train.load_debug_train_data is not None):
        problems.append(
            "rollout.debug_rollout_only and train.debug_train_only (or load_debug_train_data): one of the two halves has to "
            "run. Choose one of them."
        )
    if train.debug_train_only and run.generates:
        problems.append(
            "train.debug_train_only: there is nothing to train on: say --load-debug-rollout-data FOLDER (made with "
            "--dump-rollouts) or --load-debug-train-data FOLDER (made with --save-debug-train-data)."
        )
    if rollout.load_debug_rollout_data is not None and rollout.collector is not None:
        problems.append(
            "rollout.load_debug_rollout_data and rollout.collector both say where groups come from: drop one."
        )
    debug = run.config.debug
    if debug.use_pytorch_profiler and debug.profile_step_end <= debug.profile_step_start:
        problems.append(
            f"debug.profile_step_end = {debug.profile_step_end} must be more than profile_step_start = "
            f"{debug.profile_step_start}."
        )
    return problems


def corrections(run: BoundRun) -> list[str]:
    keys, problems = run.algo.keys, []
    if not keys.use_rollout_logprobs:
        problems += [
            f'algo.corrections: "{part.name}" weighs how far the current log-probs are from the old ones, and with one '
            "optimiser step per rollout batch they are equal: say --num-steps-per-rollout 2 or more, or "
            "--use-rollout-logprobs, or leave it out."
            for part in run.algo.corrections
            if part.driver.compares_with_old and run.steps_per_rollout == 1
        ]
    if not (keys.use_rollout_logprobs or keys.true_on_policy_mode):
        return problems
    said = "use_rollout_logprobs" if keys.use_rollout_logprobs else "true_on_policy_mode"
    return problems + [
        f"algo.{said} = true: correction \"{part.name}\" weighs the gap between the trainer's and the engine's "
        "log-probs, which is then 0 by definition. Drop one of the two."
        for part in run.algo.corrections
        if Need.ROLLOUT_LOGPROBS in part.driver.needs
    ]


def sampling(run: BoundRun) -> list[str]:
    rollout = run.config.rollout
    cut = {"rollout_top_p": (rollout.rollout_top_p, 1.0), "rollout_top_k": (rollout.rollout_top_k, -1)}
    if Capability.TOP_P_IDS in run.engine.driver.may_offer:
        return []
    return [
        f"rollout.{key} = {value}: log-probs of a cut distribution need the kept token ids, which engine "
        f'"{run.engine.name}" does not report. Use {key} = {off}.'
        for key, (value, off) in cut.items()
        if value != off
    ]


def saved_aside(run: BoundRun) -> list[str]:
    if not run.config.checkpoint.async_save:
        return []
    return [
        f'checkpoint.async_save = true: backend "{backend}" writes checkpoints only while it waits for them. Leave it out.'
        for backend in dict.fromkeys(role.backend.name for role in run.roles if not role.backend.driver.stages)
    ]


def launcher(run: BoundRun) -> list[str]:
    problems = list(run.launcher.driver.problems(run.launcher.config))
    if run.launcher.driver.single_process and run.num_ranks != 1:
        problems.append(
            f'launcher.name = "{run.launcher.name}" runs one trainer rank in this process, but {run.num_ranks} were asked '
            f"for: say {run.other_launchers}."
        )
    return problems


def layout(run: BoundRun) -> list[str]:
    engines = [run.engine, *(row.engine for row in run.served)]
    problems = list(dict.fromkeys(p for engine in engines for p in engine.driver.problems(engine.config)))
    for role in run.roles:
        try:
            model_config = json.loads((role.model_path / "config.json").read_text())
        except (OSError, ValueError):
            # No folder, or a damaged one: loading it is what tells of that, and the backend has nothing to compare with.
            continue
        problems += role.backend.driver.problems(role.backend.config, role.num_ranks, model_config)
    # Roles with one backend and one model say the same.
    return list(dict.fromkeys(problems))
