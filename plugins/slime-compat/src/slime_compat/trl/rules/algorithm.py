"""Rules for `algo`."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.trl.translation import TrlTranslation

AVERAGES: Final = {
    "grpo": "seq_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "bnpo": "token_mean",
}
"""TRL's loss_type -> aggregation of slime."""
NO_BOUND: Final = 1e-30
"""Lower bound of a ratio that TRL does not bound."""
IMPORTANCE: Final = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
"""TRL's mode -> level and mode of the correction mis."""


def algorithm(translation: TrlTranslation) -> None:
    loss = translation.text("loss_type")
    level = translation.text("importance_sampling_level")
    name = "cispo" if loss == "cispo" else "gspo" if level == "sequence" else "grpo"
    translation.put("algo.name", name)
    if loss not in AVERAGES:
        translation.note(
            "loss_type", f"{loss}: write a loss (slime.losses); that of loss_type dapo is in its place", trains=True
        )
    if loss == "bnpo":
        translation.note(
            "loss_type", "bnpo: the mean over the tokens of a micro-batch, here of the whole step", trains=True
        )
    if loss == "cispo" and level == "sequence":
        translation.note("importance_sampling_level", "sequence: cispo has ratios of tokens here", trains=True)
    translation.put("algo.aggregation", AVERAGES.get(loss, "token_mean"))
    clip(translation, name)
    scaling(translation)
    kl(translation)
    entropy(translation, loss)
    correction(translation)
    if translation.switch("mask_truncated_completions"):
        translation.put("rollout.filters", ["overlong_filter"])


def clip(translation: TrlTranslation, name: str) -> None:
    low = translation.number("epsilon", float)
    high = low if translation.value("epsilon_high") is None else translation.number("epsilon_high", float)
    if name == "cispo":
        # TRL's epsilon_high is the largest weight, slime's eps_clip_high what it may exceed 1 by. Neither has a smallest one.
        translation.put("algo.eps_clip", 1.0)
        if high > 1:
            translation.put("algo.eps_clip_high", high - 1)
        else:
            translation.note(
                "epsilon_high", f"{high:g}: TRL lowers all weights of cispo to it; it must exceed 1 here", trains=True
            )
        return
    translation.put("algo.eps_clip", low)
    translation.put("algo.eps_clip_high", high)
    if translation.value("delta") is not None:
        delta = translation.number("delta", float)
        if name == "grpo" and delta > 1 + high:
            # Where A > 0 the clip is below delta, and where A < 0 delta bounds the loss.
            translation.put("algo.eps_clip_c", delta)
        else:
            translation.note("delta", f"{delta:g}: needs token ratios and more than 1 + epsilon_high here", trains=True)


def scaling(translation: TrlTranslation) -> None:
    by = translation.value("scale_rewards")
    if by in (False, "none", "False"):
        translation.put("algo.disable_grpo_std_normalization", True)
    elif by not in (True, "group"):
        translation.note(
            "scale_rewards", f"{by}: rewards are scaled by the group's standard deviation here", trains=True
        )


def kl(translation: TrlTranslation) -> None:
    beta, unbiased = translation.number("beta", float), translation.switch("use_bias_correction_kl")
    if beta:
        translation.put("algo.kl_loss_coef", beta)
        translation.put("algo.kl_loss_type", "k3")
        translation.put("algo.use_unbiased_kl", unbiased)
    alpha, steps = translation.number("ref_model_mixup_alpha", float), translation.number("ref_model_sync_steps", int)
    if not translation.switch("sync_ref_model"):
        return
    if alpha == 1:
        translation.put("train.ref_update_interval", translation.rollout_steps("ref_model_sync_steps", steps))
    else:
        translation.note(
            "ref_model_mixup_alpha", f"{alpha:g}: the actor replaces the reference here, or never", trains=True
        )


def entropy(translation: TrlTranslation, loss: str) -> None:
    coefficient = translation.number("entropy_coef", float)
    if coefficient:
        translation.put("algo.entropy_coef", coefficient)
        if AVERAGES.get(loss) != "token_mean":
            translation.note(
                "entropy_coef", "a mean over tokens in TRL; here it is averaged as the loss is", trains=True
            )


def correction(translation: TrlTranslation) -> None:
    mode, most = (
        translation.text("vllm_importance_sampling_mode"),
        translation.value("vllm_importance_sampling_clip_max"),
    )
    least = translation.value("vllm_importance_sampling_clip_min")
    applied = translation.switch("vllm_importance_sampling_correction")
    if not (applied and translation.switch("use_vllm")):
        return
    if mode not in IMPORTANCE or most is None:
        translation.note(
            "vllm_importance_sampling_mode", f"{mode}: set algo.corrections to mis, with its bounds", trains=True
        )
        return
    level, action = IMPORTANCE[mode]
    if action == "truncate" and least is not None:
        action = "clip"
    options: dict[str, Any] = {
        "tis_level": level,
        "tis_mode": action,
        "tis_upper_bound": float(most),
        "rs_veto_threshold": 0.0,
    }
    if action != "truncate":
        options["tis_lower_bound"] = NO_BOUND if least is None else float(least)
    translation.put("algo.corrections", [{"name": "mis"} | options])
