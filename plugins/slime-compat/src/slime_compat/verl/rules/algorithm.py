"""Rules for `algo`."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import ACTOR, CORRECTION
from slime_core.errors import near_matches

ESTIMATORS: Final = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
"""verl's estimator -> algorithm of slime."""
LOSSES: Final = {"vanilla": "clip", "gspo": "sequence_clip", "cispo": "cispo"}
"""verl's loss_mode -> loss of slime."""
KL_ESTIMATORS: Final = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    # verl clamps k3 under both names.
    "k3": "low_var_kl",
    "low_var_kl": "low_var_kl",
}
WITH_KL_IN_REWARD: Final = frozenset({"ppo", "reinforce_plus_plus"})


def algorithm(translation: PeerTranslation) -> None:
    estimator = chosen(
        translation, "algorithm.adv_estimator", ESTIMATORS, "grpo", "write an advantage (slime.advantages)"
    )
    translation.put("algo.name", estimator)
    loss = chosen(translation, f"{ACTOR}.policy_loss.loss_mode", LOSSES, "clip", "write a loss (slime.losses)")
    if (estimator, loss) in (("grpo", "sequence_clip"), ("grpo", "cispo")):
        translation.put("algo.name", "gspo" if loss == "sequence_clip" else "cispo")
    elif loss != "clip":
        translation.put("algo.loss", loss)
    clip(translation, loss)
    averaging(translation, loss)
    credit(translation, estimator)
    kl(translation, estimator)
    entropy = translation.number(f"{ACTOR}.entropy_coeff", float)
    if entropy:
        translation.put("algo.entropy_coef", entropy)
    correction(translation)


def chosen(translation: PeerTranslation, key: str, names: dict[str, str], instead: str, what_to_do: str) -> str:
    name = translation.text(key)
    if name in names:
        return names[name]
    close = near_matches(name, names)
    matches = f" (close match: {', '.join(close)})" if close else ""
    translation.note(
        key, f"{name}: slime has none of this name{matches}; {what_to_do}. {instead} is in its place", trains=True
    )
    return instead


def clip(translation: PeerTranslation, loss: str) -> None:
    low = translation.number(f"{ACTOR}.clip_ratio_low", float)
    high = translation.number(f"{ACTOR}.clip_ratio_high", float)
    both = translation.number(f"{ACTOR}.clip_ratio", float)
    unset = [name for name in ("low", "high") if f"{ACTOR}.clip_ratio_{name}" not in translation.given]
    if both != 0.2 and unset:
        translation.note(
            f"{ACTOR}.clip_ratio",
            f"{both:g}: no effect in verl, where clip_ratio_{' and clip_ratio_'.join(unset)} have their own defaults",
        )
    translation.put("algo.eps_clip", low)
    translation.put("algo.eps_clip_high", high)
    dual = translation.number(f"{ACTOR}.clip_ratio_c", float)
    if loss == "clip":
        translation.put("algo.eps_clip_c", dual)


def averaging(translation: PeerTranslation, loss: str) -> None:
    key = f"{ACTOR}.loss_agg_mode"
    mode = translation.text(key)
    length = translation.number("data.max_response_length", int)
    if loss == "sequence_clip" or mode == "seq-mean-token-mean":
        translation.put("algo.aggregation", "seq_mean")
    elif mode == "token-mean":
        translation.put("algo.aggregation", "token_mean")
    elif mode == "seq-mean-token-sum":
        # A gradient divided by L, clipped at 1 / L of the norm, with eps / L, makes the same step of Adam.
        translation.put("algo.aggregation", "constant")
        translation.put("train.clip_grad", translation.number(f"{ACTOR}.grad_clip", float) / length)
        translation.put("train.adam_eps", 1e-8 / length)
        translation.note(key, f"{mode}: as a mean over {length} tokens, with clip_grad and adam_eps divided by it")
    elif mode == "seq-mean-token-sum-norm":
        translation.put("algo.aggregation", "constant")
        translation.note(
            key,
            f"{mode}: verl's loss is a sum over the sequences of a micro-batch, here it is their mean: the same steps of Adam "
            "only while clip_grad does not cut the gradient",
            trains=True,
        )
    else:
        translation.put("algo.aggregation", "token_mean")
        translation.note(key, f"{mode}: unknown; token-mean is in its place", trains=True)


def credit(translation: PeerTranslation, estimator: str) -> None:
    by_std = translation.switch("algorithm.norm_adv_by_std_in_grpo")
    gamma, lam = translation.number("algorithm.gamma", float), translation.number("algorithm.lam", float)
    if estimator == "grpo" and not by_std:
        translation.put("algo.disable_grpo_std_normalization", True)
    if (
        estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline")
        and translation.get("rollout.n_samples_per_prompt") == 1
    ):
        translation.note(
            "actor_rollout_ref.rollout.n",
            f"1: verl trains on the reward itself; here {estimator} has no advantage without a second sample. Use more samples",
            trains=True,
        )
    if estimator in ("ppo", "reinforce_plus_plus"):
        translation.put("algo.gamma", gamma)
    if estimator == "ppo":
        translation.put("algo.lambd", lam)
        translation.put("algo.normalize_advantages", True)


def kl(translation: PeerTranslation, estimator: str) -> None:
    """Coefficients have no effect without their switch, so only used ones are written."""
    in_loss, loss_type = translation.number(f"{ACTOR}.kl_loss_coef", float), translation.text(f"{ACTOR}.kl_loss_type")
    if translation.switch(f"{ACTOR}.use_kl_loss"):
        translation.put("algo.use_kl_loss", True)
        translation.put("algo.kl_loss_coef", in_loss)
        translation.put("algo.kl_loss_type", kl_estimator(translation, f"{ACTOR}.kl_loss_type", loss_type))
    in_reward, penalty = (
        translation.number("algorithm.kl_ctrl.kl_coef", float),
        translation.text("algorithm.kl_penalty"),
    )
    controller = translation.text("algorithm.kl_ctrl.type")
    if not translation.switch("algorithm.use_kl_in_reward") or not in_reward:
        return
    if estimator not in WITH_KL_IN_REWARD:
        translation.note(
            "algorithm.use_kl_in_reward",
            f"{estimator} has no KL penalty in the reward here; use the KL term of the loss: algo.kl_loss_coef",
            trains=True,
        )
        return
    if controller != "fixed":
        translation.note(
            "algorithm.kl_ctrl.type", f"{controller}: the coefficient stays {in_reward:g} here", trains=True
        )
    translation.put("algo.kl_coef", in_reward)
    translation.put("algo.kl_reward_type", kl_estimator(translation, "algorithm.kl_penalty", penalty))


def kl_estimator(translation: PeerTranslation, key: str, name: str) -> str:
    if name not in KL_ESTIMATORS:
        translation.note(
            key,
            f"{name}: slime has {', '.join(sorted(set(KL_ESTIMATORS.values())))}; write an estimator (slime.kl). "
            "low_var_kl is in its place",
            trains=True,
        )
    return KL_ESTIMATORS.get(name, "low_var_kl")


def correction(translation: PeerTranslation) -> None:
    """Truncated importance sampling between engine and trainer."""
    level = translation.text(f"{CORRECTION}.rollout_is")
    bound = translation.number(f"{CORRECTION}.rollout_is_threshold", float)
    normalize = translation.switch(f"{CORRECTION}.rollout_is_batch_normalize")
    if level not in ("token", "sequence"):
        if level:
            translation.note(f"{CORRECTION}.rollout_is", f"{level}: must be token or sequence", trains=True)
        return
    options: dict[str, Any] = {
        "tis_level": level,
        "tis_mode": "truncate",
        "tis_upper_bound": bound,
        "rs_veto_threshold": 0.0,
    }
    translation.put(
        "algo.corrections", [{"name": "mis"} | options | ({"tis_batch_normalize": True} if normalize else {})]
    )
