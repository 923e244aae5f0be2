"""Rules for `algo` and for the optimizer in `train`."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.translation import Translation
from slime_core.errors import near_matches

ALGORITHMS: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
GROUP_RELATIVE: Final = frozenset({"grpo", "gspo", "cispo"})
"""Algorithms without KL in the reward."""


def algorithm(translation: Translation) -> None:
    estimator = translation.take("advantage-estimator") or "grpo"
    loss = translation.take("loss-type") or "policy_loss"
    if loss == "sft_loss":
        translation.put("algo.name", "sft")
        for name in (
            "disable-compute-advantages-and-returns",
            "calculate-per-token-loss",
            "eps-clip",
            "eps-clip-high",
        ):
            translation.take(name)
        return
    if loss != "policy_loss":
        translation.note(
            "loss-type", f"{loss}: no such loss here; write one (slime.losses), see slime-grpo", trains=True
        )
    if estimator not in ALGORITHMS:
        close = near_matches(estimator, ALGORITHMS)
        matches = f"; close match: {', '.join(close)}" if close else ""
        translation.note("advantage-estimator", f"{estimator}: unknown algorithm{matches}", trains=True)
        estimator = "grpo"
    translation.put("algo.name", estimator)
    clip = translation.number("eps-clip", float, 0.2)
    translation.put("algo.eps_clip", clip)
    translation.put("algo.eps_clip_high", translation.number("eps-clip-high", float, clip))
    translation.put("algo.aggregation", "token_mean" if translation.take("calculate-per-token-loss") else "seq_mean")
    kl(translation, estimator)
    corrections(translation)
    distillation(translation)


def kl(translation: Translation, estimator: str) -> None:
    """Leaves out coefficients that had no effect upstream, since here they would have one."""
    kind = translation.take("kl-loss-type") or "k1"
    in_loss, in_reward = translation.number("kl-loss-coef", float, 0.0), translation.number("kl-coef", float, 0.0)
    translation.put("algo.kl_loss_type", kind)
    if "use-kl-loss" in translation.given:
        translation.put("algo.kl_loss_coef", in_loss)
    elif in_loss:
        translation.note("kl-loss-coef", f"{in_loss}: left out, since it has no effect without --use-kl-loss upstream")
    if in_reward and estimator in GROUP_RELATIVE:
        translation.note("kl-coef", f"{in_reward}: left out, since it has no effect with {estimator} upstream")
    elif in_reward:
        translation.put("algo.kl_coef", in_reward)
        translation.put("algo.kl_reward_type", kind)


def corrections(translation: Translation) -> None:
    found: list[dict[str, Any]] = []
    tis = {
        key: clip
        for key in ("tis_clip", "tis_clip_low")
        if (clip := translation.number(key.replace("_", "-"), float, None)) is not None
    }
    custom = translation.take("custom-tis-function-path")
    if translation.take("use-tis") and custom is None:
        found.append({"name": "tis", "tis_clip": 2.0, "tis_clip_low": 0.0} | tis)
    delta = translation.number("opsm-delta", float, 1e-4)
    if translation.take("use-opsm"):
        found.append({"name": "opsm", "opsm_delta": delta})
    if found:
        translation.put("algo.corrections", found)


def distillation(translation: Translation) -> None:
    kind, coefficient = translation.take("opd-type"), translation.number("opd-kl-coef", float, 1.0)
    if not translation.take("use-opd"):
        return
    translation.put("algo.advantage_terms", [{"name": "reverse_kl", "opd_kl_coef": coefficient}])
    if kind == "sglang":
        translation.note(
            "opd-type", "sglang: set the folder that the teacher's engines load: --engines.teacher.load", trains=True
        )


def optimizer(translation: Translation) -> None:
    """Writes Megatron's defaults where slime's differ."""
    translation.put("train.weight_decay", translation.number("weight-decay", float, 0.01))
    translation.put("train.adam_beta2", translation.number("adam-beta2", float, 0.999))
    style = translation.take("lr-decay-style") or "linear"
    if style in ("constant", "linear", "cosine"):
        translation.put("train.lr_decay_style", style)
    else:
        translation.note("lr-decay-style", f"{style}: must be constant, linear or cosine", trains=True)
    translation.put("train.use_dynamic_batch_size", translation.take("use-dynamic-batch-size") is not None)
