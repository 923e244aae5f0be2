"""Rules for batch sizes and steps: TRL counts completions on each process, and its steps are optimizer steps."""

from __future__ import annotations

import math

from slime_compat.trl.translation import TrlTranslation


def batches(translation: TrlTranslation) -> None:
    processes = translation.num_processes
    per_device = translation.number("per_device_train_batch_size", int)
    accumulated = translation.number("gradient_accumulation_steps", int)
    samples = translation.number("num_generations", int)
    given, between = translation.value("generation_batch_size"), translation.value("steps_per_generation")
    per_step = per_device * processes * accumulated
    per_generation = per_device * processes * (accumulated if between is None else int(between))
    generated = per_generation if given is None else translation.number("generation_batch_size", int)
    translation.put("rollout.rollout_batch_size", max(1, generated // samples))
    translation.put("rollout.n_samples_per_prompt", samples)
    translation.put("train.global_batch_size", per_step)
    translation.put("train.use_dynamic_batch_size", False)
    translation.put("train.micro_batch_size", per_device)
    translation.steps_per_rollout = max(1, generated // per_step)
    if generated % samples:
        translation.note(
            "num_generations", f"{samples}: does not divide the {generated} completions of a batch", trains=True
        )
    elif generated % per_step:
        translation.note(
            "steps_per_generation",
            f"the {generated} completions of a batch must be a multiple of the {per_step} of an optimizer step",
            trains=True,
        )
    if not translation.knows_processes:
        translation.note(
            "per_device_train_batch_size",
            f"{per_device}: on one process, {per_step} completions a step; pass --num-processes as to accelerate launch",
        )
    iterations = translation.number("num_iterations", int)
    if iterations != 1:
        translation.note("num_iterations", f"{iterations}: a batch is trained on once here", trains=True)
    steps(translation)


def steps(translation: TrlTranslation) -> None:
    most, epochs = translation.number("max_steps", int), translation.number("num_train_epochs", float)
    if most > 0:
        translation.put("train.num_rollout", translation.rollout_steps("max_steps", most))
        return
    translation.put("train.num_epoch", math.ceil(epochs))
    if not epochs.is_integer():
        translation.note("num_train_epochs", f"{epochs:g}: whole epochs here, {math.ceil(epochs)}", trains=True)


def schedule(translation: TrlTranslation) -> None:
    """Both count optimizer steps."""
    for keyword, key in (
        ("learning_rate", "lr"),
        ("weight_decay", "weight_decay"),
        ("adam_beta1", "adam_beta1"),
        ("adam_beta2", "adam_beta2"),
        ("adam_epsilon", "adam_eps"),
        ("max_grad_norm", "clip_grad"),
    ):
        translation.put(f"train.{key}", translation.number(keyword, float))
    optimizer = translation.text("optim")
    if not optimizer.startswith("adamw_torch"):
        translation.note("optim", f"{optimizer}: Adam is in its place; see slime plugins for others", trains=True)
    style = translation.text("lr_scheduler_type").rpartition(".")[2].lower()
    decays = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if style not in decays:
        translation.note(
            "lr_scheduler_type", f"{style}: {', '.join(decays)} are known; linear is in its place", trains=True
        )
    translation.put("train.lr_decay_style", decays.get(style, "linear"))
    warmup = warmup_steps(translation)
    if warmup and style != "constant":
        translation.put("train.lr_warmup_iters", warmup)


def warmup_steps(translation: TrlTranslation) -> int:
    ratio = translation.value("warmup_ratio") or 0.0
    given = translation.number("warmup_steps", float)
    if 0 < given < 1:
        # transformers 5 has one keyword for both.
        ratio, given = given, 0.0
    if given or not ratio:
        return int(given)
    most = translation.number("max_steps", int)
    if most > 0:
        return math.ceil(ratio * most)
    translation.note(
        "warmup_ratio", f"{ratio:g}: the number of steps is not known here; set train.lr_warmup_iters", trains=True
    )
    return 0
