"""Cross-checks between tables and plugins. They compare declared sets, never names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import isqrt
from pathlib import Path

from slime_core.config import engine_checks, role_checks
from slime_core.config.bound import BoundRun
from slime_core.config.size_checks import sizes
from slime_core.contracts.engine import Capability
from slime_core.contracts.needs import Need


def cross_checks(run: BoundRun) -> list[str]:
    """All problems, each a sentence with the key, its value, what is wrong and how to fix it."""
    checks: tuple[Callable[[BoundRun], Iterable[str]], ...] = (
        batch_arithmetic,
        run_length,
        warmup,
        asynchrony,
        true_on_policy,
        group_baseline,
        kl_terms,
        advantages,
        collector,
        rewards,
        engine_checks.reward_model,
        debug_parts,
        role_checks.teacher,
        role_checks.asked_roles,
        role_checks.settings_without_role,
        role_checks.losses_of_roles,
        role_checks.needs,
        role_checks.optimizers,
        corrections,
        sampling,
        engine_checks.penalties,
        engine_checks.rollout_workers,
        engine_checks.routing_replay,
        engine_checks.transport,
        engine_checks.colocation,
        engine_checks.engines_over_nodes,
        engine_checks.engine_layouts,
        engine_checks.media,
        saved_aside,
    )
    # Nothing else is compared with numbers that cannot be meant.
    if absurd := list(sizes(run)):
        return absurd
    # The layout comes last: a backend that reads the model's config may import torch, which takes seconds.
    return [problem for check in checks for problem in check(run)] or [*launcher(run), *layout(run)]


def batch_arithmetic(run: BoundRun) -> Iterable[str]:
    rollout, train = run.config.rollout, run.config.train
    total, size, steps = run.rollouts_per_batch, train.global_batch_size, train.num_steps_per_rollout
    product = f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt {rollout.n_samples_per_prompt} = {total}"
    if size is not None and steps is not None and size * steps != total:
        yield (
            f"{product}, but global_batch_size {size} x num_steps_per_rollout {steps} = {size * steps}. "
            "Give only one of the two, or make the products equal."
        )
    elif size is not None and total % size:
        yield f"{product} is not a multiple of global_batch_size {size}. Nearest that fit: {nearest(total, size)}."
    elif size is None and steps is not None and total % steps:
        yield f"{product} does not divide by num_steps_per_rollout {steps}. Nearest that fit: {nearest(total, steps)}."
    wave = rollout.over_sampling_batch_size
    if wave is not None and wave < rollout.rollout_batch_size:
        yield (
            f"over_sampling_batch_size {wave} is smaller than rollout_batch_size {rollout.rollout_batch_size}: "
            f"set {rollout.rollout_batch_size} or more, or leave it out."
        )


def nearest(total: int, asked: int) -> str:
    """The divisors of `total` next to `asked`."""
    small = [d for d in range(1, isqrt(total) + 1) if total % d == 0]
    divisors = [*small, *(total // d for d in small)]
    below = max((d for d in divisors if d < asked), default=None)
    above = min((d for d in divisors if d > asked), default=None)
    return " and ".join(str(d) for d in (below, above) if d is not None)


def run_length(run: BoundRun) -> Iterable[str]:
    train = run.config.train
    if (train.num_rollout is None) == (train.num_epoch is None):
        yield "train: give num_rollout (rollout steps) or num_epoch (passes over the data), exactly one of them."


def warmup(run: BoundRun) -> Iterable[str]:
    for where, table in (("train", run.config.train), ("roles.critic", run.config.roles.critic)):
        if table.lr_warmup_iters and table.lr_warmup_fraction is not None:
            yield f"{where}: lr_warmup_iters and lr_warmup_fraction are both the length of the warm-up. Leave one out."


def asynchrony(run: BoundRun) -> Iterable[str]:
    rollout, interval = run.config.rollout, run.config.sync.update_weights_interval
    worst, allowed = run.least_staleness, run.max_staleness
    if allowed < worst:
        yield (
            f"rollout.max_staleness = {allowed}, but rollouts {rollout.max_async_level} step(s) ahead with "
            f"update_weights_interval {interval} are up to {worst} version(s) behind: pass --max-staleness {worst} or more."
        )
    if rollout.partial_rollout and allowed == 0:
        yield (
            "rollout.partial_rollout = true: a response that continues in a later step has tokens of an older policy, and "
            "max_staleness is 0. Pass --max-staleness with the number of steps that a response may take beyond its first."
        )
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        yield (
            "rollout.mask_offpolicy_in_partial_rollout = true: no rollout is aborted without --partial-rollout. For "
            "rollouts that run ahead there is --on-stale mask_old_spans."
        )
    if rollout.in_flight and rollout.max_async_level == 0:
        yield (
            "rollout.update_weights_in_flight = true: with max_async_level = 0 no rollout runs during a weight update. Pass "
            "--max-async-level 1 or more."
        )
    if rollout.in_flight and Capability.VERSION_SPANS not in run.engine.driver.optional_capabilities:
        yield (
            f'rollout.update_weights_in_flight = true: engine "{run.engine.name}" does not report which policy version '
            "sampled which tokens of a response. Pass --no-update-weights-in-flight."
        )
    if rollout.partial_rollout and not run.collector.driver.across_steps:
        yield (
            f'rollout.partial_rollout = true: collector "{run.collector.name}" does not resume groups of earlier steps. Leave '
            "--rollout.collector out."
        )


def true_on_policy(run: BoundRun) -> Iterable[str]:
    if not run.algo.keys.true_on_policy_mode:
        return
    asked, rollout, sync = "algo.true_on_policy_mode = true:", run.config.rollout, run.config.sync
    if Capability.TRUE_ON_POLICY not in run.engine.driver.optional_capabilities:
        yield f'{asked} engine "{run.engine.name}" computes with kernels of its own. Choose another engine.'
    for problem in run.backend.driver.true_on_policy_problems(run.backend.config):
        yield f'{asked} backend "{run.backend.name}": {problem}.'
    for key, value, needed in (
        ("rollout.max_async_level", rollout.max_async_level, 0),
        ("sync.update_weights_interval", sync.update_weights_interval, 1),
        ("rollout.partial_rollout", rollout.partial_rollout, False),
    ):
        if value != needed:
            yield (
                f"{asked} with {key} = {str(value).lower()} tokens are sampled from an older policy than the one that is "
                f"trained. Use {str(needed).lower()}."
            )


def group_baseline(run: BoundRun) -> Iterable[str]:
    n, estimators = run.config.rollout.n_samples_per_prompt, run.algo.estimators
    if n == 1 and estimators and all(part.driver.compares_group(part.config) for part in estimators):
        yield (
            f'rollout.n_samples_per_prompt = 1, but advantage "{estimators[0].name}" compares the samples of one '
            "prompt, so every advantage would be 0: pass --n-samples-per-prompt 2 or more."
        )


def kl_terms(run: BoundRun) -> Iterable[str]:
    keys, advantage = run.algo.keys, run.algo.advantage
    if keys.kl_coef and keys.kl_loss_coef:
        yield (
            f"algo.kl_coef = {keys.kl_coef} and algo.kl_loss_coef = {keys.kl_loss_coef}: the KL goes into the reward or "
            "into the loss, not both. Set one of them to 0."
        )
    if keys.kl_coef and not (advantage and advantage.driver.accepts_kl_penalty):
        name = "none" if advantage is None else advantage.name
        yield f'algo.kl_coef = {keys.kl_coef}: advantage "{name}" takes no KL in the reward. Use --kl-loss-coef.'


def advantages(run: BoundRun) -> Iterable[str]:
    algo, uses = run.algo, run.algo.loss.driver.uses_advantages
    if uses and algo.advantage is None:
        yield f'algo.advantage: loss "{algo.loss.name}" uses advantages. Pass --algo.advantage NAME.'
    if algo.advantage_terms and not uses:
        yield f'algo.advantage_terms: loss "{algo.loss.name}" uses no advantages. Leave them out.'
    for part in algo.shaping:
        yield from part.driver.problems(part.config, run.config.rollout.rollout_max_response_len)


def collector(run: BoundRun) -> Iterable[str]:
    yield from run.collector.driver.problems(run.collector.config, run.config.rollout)


def rewards(run: BoundRun) -> Iterable[str]:
    if not run.rewards and run.algo.uses_rewards and not run.generate.driver.gives_rewards:
        yield f'reward: algorithm "{run.algo.name}" needs one, for example --reward NAME. `slime plugins` lists them.'
    deaf = [part.name for part in run.algo.estimators if part.driver.uses_rewards and not part.driver.accepts_spans]
    for reward in run.rewards if deaf else ():
        if reward.part.driver.gives_spans:
            yield (
                f'{reward.part.where}: "{reward.label}" rewards spans of a response, and advantage "{deaf[0]}" gives all '
                "tokens of one the same credit. Choose one that credits tokens one by one (its driver sets accepts_spans), "
                "or another reward."
            )


def debug_parts(run: BoundRun) -> Iterable[str]:
    """Runs that only generate or only train, and runs that read rollouts or train data from a file."""
    rollout, train, debug = run.config.rollout, run.config.train, run.config.debug
    if rollout.debug_rollout_only and (train.debug_train_only or train.load_debug_train_data is not None):
        yield (
            "rollout.debug_rollout_only and train.debug_train_only (or load_debug_train_data): one of the two halves has to "
            "run. Choose one of them."
        )
    if train.debug_train_only and run.generates:
        yield (
            "train.debug_train_only: there is nothing to train on: pass --load-debug-rollout-data FOLDER (made with "
            "--dump-rollouts) or --load-debug-train-data FOLDER (made with --save-debug-train-data)."
        )
    recorded = train.load_debug_train_data
    if recorded is not None and not Path(recorded).is_dir():
        hint = "Set train_data/ of the folder of a run with --save-debug-train-data."
        yield f"train.load_debug_train_data = {recorded}: no such folder. {hint}"
    if rollout.load_debug_rollout_data is not None and rollout.collector is not None:
        yield "rollout.load_debug_rollout_data and rollout.collector: both set where groups come from. Leave one out."
    if debug.use_pytorch_profiler and debug.profile_step_end <= debug.profile_step_start:
        yield (
            f"debug.profile_step_end = {debug.profile_step_end} must be more than profile_step_start = "
            f"{debug.profile_step_start}."
        )


def corrections(run: BoundRun) -> Iterable[str]:
    keys = run.algo.keys
    for part in run.algo.corrections:
        if part.driver.compares_with_old and run.steps_per_rollout == 1 and not keys.use_rollout_logprobs:
            yield (
                f'algo.corrections: "{part.name}" weighs how far the current log-probs are from the old ones, and with one '
                "optimizer step per rollout batch they are equal: pass --num-steps-per-rollout 2 or more, or "
                "--use-rollout-logprobs, or leave it out."
            )
    if not (keys.use_rollout_logprobs or keys.true_on_policy_mode):
        return
    given = "use_rollout_logprobs" if keys.use_rollout_logprobs else "true_on_policy_mode"
    for part in run.algo.corrections:
        if Need.ROLLOUT_LOGPROBS in part.driver.needs:
            yield (
                f"algo.{given} = true: correction \"{part.name}\" weighs the gap between the trainer's and the engine's "
                "log-probs, which is then 0 by definition. Drop one of the two."
            )


def sampling(run: BoundRun) -> Iterable[str]:
    rollout = run.config.rollout
    if Capability.TOP_P_IDS in run.engine.driver.optional_capabilities:
        return
    cut = (("rollout_top_p", rollout.rollout_top_p, 1.0), ("rollout_top_k", rollout.rollout_top_k, -1))
    for key, value, off in cut:
        if value != off:
            yield (
                f"rollout.{key} = {value}: log-probs of a cut distribution need the kept token ids, which engine "
                f'"{run.engine.name}" does not report. Use {key} = {off}.'
            )


def saved_aside(run: BoundRun) -> Iterable[str]:
    if not run.config.checkpoint.async_save:
        return
    for backend in dict.fromkeys(
        role.backend.name for role in run.roles if not role.backend.driver.supports_async_save
    ):
        yield (
            f'checkpoint.async_save = true: backend "{backend}" writes checkpoints only while it waits for them. Leave it '
            "out."
        )


def launcher(run: BoundRun) -> Iterable[str]:
    yield from run.launcher.driver.problems(run.launcher.config)
    if run.launcher.driver.single_process and run.num_ranks != 1:
        yield (
            f'launcher.name = "{run.launcher.name}" runs one trainer rank in this process, but {run.num_ranks} are '
            f"requested. Pass {run.other_launchers}."
        )


def layout(run: BoundRun) -> list[str]:
    engines = [run.engine, *(row.engine for row in run.served)]
    problems = list(dict.fromkeys(p for engine in engines for p in engine.driver.problems(engine.config)))
    for role in run.roles:
        try:
            model_config = json.loads((role.model_path / "config.json").read_text())
        except (OSError, ValueError):
            # No folder, or a damaged one: loading it reports that, and the backend has nothing to compare with.
            continue
        problems += role.backend.driver.problems(role.backend.config, role.num_ranks, model_config)
    # Roles with one backend and one model have the same problems.
    return list(dict.fromkeys(problems))
