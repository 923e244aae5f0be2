"""Rules for the optimizers of the policy and the critic. verl's schedules count rollout steps, slime's optimizer steps."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import ACTOR

OFF_BY_DEFAULT: Final = ("min_lr", "lr_warmup_iters")
"""Keys that are 0 in slime too if they are not set."""


def optimizer(translation: PeerTranslation, *, megatron: bool) -> None:
    for name, value in keys_of(translation, f"{ACTOR}.optim", megatron).items():
        if value or name not in OFF_BY_DEFAULT:
            translation.put(f"train.{name}", value)
    clip = translation.number(f"{ACTOR}.optim.clip_grad" if megatron else f"{ACTOR}.grad_clip", float)
    if translation.get("train.clip_grad") is None:
        translation.put("train.clip_grad", clip)
    other = f"{ACTOR}.grad_clip" if megatron else f"{ACTOR}.optim.clip_grad"
    translation.read.add(other)


def critic(translation: PeerTranslation, *, megatron: bool) -> None:
    if translation.get("algo.name") != "ppo":
        # verl starts no critic then.
        translation.read |= {key for key in translation.given if key.startswith("critic.")}
        translation.read.add("trainer.critic_warmup")
        return
    load = translation.value("critic.model.path")
    if load is not None:
        translation.put("roles.critic.load", str(load))
    else:
        translation.note("critic.model.path", "not set: the critic starts from the policy's folder here", trains=True)
    for name, value in keys_of(translation, "critic.optim", megatron).items():
        of_policy = translation.get(f"train.{name}")
        if name == "lr" or value != (0 if name in OFF_BY_DEFAULT and of_policy is None else of_policy):
            translation.put(f"roles.critic.{name}", value)
    # verl's loss of values has a factor of 1/2. Without it, twice the bound and twice eps make the same step of Adam.
    scale = (translation.get("train.adam_eps") or 1e-8) / 1e-8
    key = "critic.optim.clip_grad" if megatron else "critic.grad_clip"
    translation.put("roles.critic.clip_grad", 2 * translation.number(key, float) * scale)
    translation.put("roles.critic.adam_eps", 2e-8 * scale)
    translation.read |= {"critic.optim.clip_grad", "critic.grad_clip"}
    translation.put("algo.value_clip", translation.number("critic.cliprange_value", float))
    warmup = translation.number("trainer.critic_warmup", int)
    if warmup > 1:
        # verl counts steps from 1, and trains the policy from step `critic_warmup` on.
        translation.put("algo.num_critic_only_steps", warmup - 1)
    for key, of_actor in (
        ("critic.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
        ("critic.loss_agg_mode", f"{ACTOR}.loss_agg_mode"),
    ):
        value = translation.value(key)
        if value is not None and value != translation.value(of_actor):
            translation.note(key, f"{value}: the critic's batches and averages are the policy's here", trains=True)


def keys_of(translation: PeerTranslation, table: str, megatron: bool) -> dict[str, Any]:
    """The keys of one optimizer, under slime's names."""
    name = translation.text(f"{table}.optimizer")
    if name.lower() not in ("adamw", "adam"):
        translation.note(
            f"{table}.optimizer", f"{name}: Adam is in its place; see slime plugins for others", trains=True
        )
    lr = translation.number(f"{table}.lr", float)
    beta1, beta2 = translation.value(f"{table}.betas")
    style_key = f"{table}.lr_decay_style" if megatron else f"{table}.lr_scheduler_type"
    style = translation.text(f"{table}.warmup_style") or translation.text(style_key)
    keys: dict[str, Any] = {
        "lr": lr,
        "weight_decay": translation.number(f"{table}.weight_decay", float),
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "lr_decay_style": style if style in ("constant", "linear", "cosine") else "constant",
    }
    if style not in ("constant", "linear", "cosine"):
        translation.note(
            style_key, f"{style}: must be constant, linear or cosine here; constant is in its place", trains=True
        )
    least = (
        translation.number(f"{table}.min_lr", float)
        if megatron
        else lr * translation.number(f"{table}.min_lr_ratio", float)
    )
    keys["min_lr"] = 0.0 if keys["lr_decay_style"] == "constant" else least
    decay = translation.value(f"{table}.lr_decay_steps")
    if decay is not None:
        keys["lr_decay_iters"] = translation.number(f"{table}.lr_decay_steps", int) * per_rollout(translation)
    keys["lr_warmup_iters"] = warmup_of(translation, table, style)
    return keys


def warmup_of(translation: PeerTranslation, table: str, style: str) -> int:
    """Optimizer steps of the warm-up."""
    steps = translation.number(f"{table}.lr_warmup_steps", int)
    ratio = translation.number(f"{table}.lr_warmup_steps_ratio", float)
    total = translation.get("train.num_rollout")
    key = f"{table}.lr_warmup_steps" if steps >= 0 else f"{table}.lr_warmup_steps_ratio"
    if steps < 0 and ratio and total is None:
        translation.note(
            key,
            f"{ratio:g}: the number of steps is not known here; set train.lr_warmup_iters = {ratio:g} x rollout steps x "
            f"{per_rollout(translation)} (roles.critic.lr_warmup_iters for the critic)",
            trains=True,
        )
        return 0
    steps = steps if steps >= 0 else int(ratio * (total or 0))
    if per_rollout(translation) > 1 and (steps or style != "constant"):
        translation.note(
            key,
            "the learning rate changes with each optimizer step here, and with each rollout step of "
            f"{per_rollout(translation)} optimizer steps in verl: the same at the beginning of each rollout step",
            trains=True,
        )
    return steps * per_rollout(translation)


def per_rollout(translation: PeerTranslation) -> int:
    """Optimizer steps per rollout step."""
    samples = translation.get("rollout.rollout_batch_size") * translation.get("rollout.n_samples_per_prompt")
    return int(max(1, samples // translation.get("train.global_batch_size")))
