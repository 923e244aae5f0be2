"""Rules for `algo` and for the optimizer in `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml  # type: ignore[import-untyped]

from slime_compat.flag_words import guessed
from slime_compat.translation import Translation
from slime_core.config.train import OptimizerOverrides
from slime_core.errors import near_matches

MIS: Final = "mis.compute_mis_weights_with_cp"
"""End of the path of upstream's example of a correction, which the correction mis computes."""
MIS_OPTIONS: Final = (
    "use_rs",
    "tis_level",
    "tis_mode",
    "tis_lower_bound",
    "tis_upper_bound",
    "tis_batch_normalize",
    "rs_level",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
)
TEACHER_REWARDS: Final = "slime.rollout.on_policy_distillation.reward_func"
ALGORITHMS: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
NO_LIMIT: Final = 2**30
"""Tokens: more than any model reads."""
OF_POLICY_LOSS: Final = (
    "advantage-estimator",
    "entropy-coef",
    "eps-clip",
    "eps-clip-high",
    "kl-coef",
    "kl-loss-coef",
    "kl-loss-type",
    "use-kl-loss",
)
GROUP_RELATIVE: Final = frozenset({"grpo", "gspo", "cispo"})
"""Algorithms without KL in the reward."""


def algorithm(translation: Translation) -> None:
    estimator = translation.take("advantage-estimator") or "grpo"
    loss = translation.take("loss-type") or "policy_loss"
    if loss == "sft_loss":
        supervised(translation)
        return
    if translation.take("loss-mask-type"):
        translation.note("loss-mask-type", "it has no effect without --loss-type sft_loss")
    if loss != "policy_loss" and not (loss == "custom_loss" and "custom-loss-function-path" in translation.given):
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


def supervised(translation: Translation) -> None:
    """Fine-tuning on conversations. Upstream cuts none of them, and reads no flags of a policy's loss."""
    translation.put("algo.name", "sft")
    # Upstream renders conversations with or without its flag for it.
    translation.put("data.apply_chat_template", True)
    for name in ("calculate-per-token-loss", "disable-compute-advantages-and-returns", "rm-type", *OF_POLICY_LOSS):
        translation.take(name)
    if "rollout-max-response-len" not in translation.given:
        translation.put("rollout.rollout_max_response_len", NO_LIMIT)
    kind = translation.take("loss-mask-type")
    if kind == "distill_qwen":
        translation.put("rollout.collector", {"name": "sft", "loss_mask_type": "last_assistant"})
        translation.note(
            "loss-mask-type",
            f"{kind}: the last response is trained, with its end token and after all earlier turns; upstream leaves both out",
            trains=True,
        )


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
    if custom is not None and custom.endswith(MIS):
        found.append({"name": "mis"} | mis_options(translation))
    delta = translation.number("opsm-delta", float, 1e-4)
    if translation.take("use-opsm"):
        found.append({"name": "opsm", "opsm_delta": delta})
    if found:
        translation.put("algo.corrections", found)


def mis_options(translation: Translation) -> dict[str, Any]:
    """Options of upstream's example of a correction, which has the names of the correction mis."""
    return {
        key: guessed(translation.given[flag])
        for key in MIS_OPTIONS
        if (flag := key.replace("_", "-")) in translation.given and translation.take(flag) != "None"
    }


def distillation(translation: Translation) -> None:
    kind, coefficient = translation.take("opd-type"), translation.number("opd-kl-coef", float, 1.0)
    if not translation.take("use-opd"):
        return
    translation.put("algo.advantage_terms", [{"name": "reverse_kl", "opd_kl_coef": coefficient}])
    if kind == "sglang":
        teacher(translation, coefficient)


def teacher(translation: Translation, coefficient: float) -> None:
    """A teacher that a server outside of the run serves. Upstream's reward function asks it, and returns rewards of 0."""
    rewards = translation.given.get("custom-rm-path", [""])[-1]
    if rewards == TEACHER_REWARDS:
        for name in ("custom-rm-path", "custom-reward-post-process-path", "rm-type"):
            translation.given.pop(name, None)
        translation.tables["algo"] = {
            key: value for key, value in translation.tables["algo"].items() if key != "advantage_terms"
        } | {"name": "opd", "opd_kl_coef": coefficient}
    url = urlsplit(translation.take("rm-url") or "")
    folder = translation.given.get("hf-checkpoint", [""])[-1]
    translation.put("engines.teacher.load", folder)
    if url.netloc:
        addresses = {"name": "sglang", "external_engine_addrs": [url.netloc]}
        translation.put("engines.teacher.engine", addresses)
    translation.note(
        "opd-type",
        f"sglang: the teacher is engines.teacher, {f'the server at {url.netloc}' if url.netloc else 'started by the run'}. Set "
        "engines.teacher.load to the folder of its model, which the launch line does not name",
    )


def optimizer(translation: Translation) -> None:
    """Writes Megatron's defaults where slime's differ."""
    translation.put("train.weight_decay", translation.number("weight-decay", float, 0.01))
    translation.put("train.adam_beta2", translation.number("adam-beta2", float, 0.999))
    roles(translation)
    style = translation.take("lr-decay-style") or "linear"
    if style in ("constant", "linear", "cosine"):
        translation.put("train.lr_decay_style", style)
    else:
        translation.note("lr-decay-style", f"{style}: must be constant, linear or cosine", trains=True)
    translation.put("train.use_dynamic_batch_size", translation.take("use-dynamic-batch-size") is not None)


def roles(translation: Translation) -> None:
    """The file of --megatron-config-path: options of the actor, which override the line's, and of the critic."""
    file = translation.take("megatron-config-path")
    if file is None:
        return
    try:
        rows = yaml.safe_load(Path(file).read_text())["megatron"]
        overrides = {row["role"]: row.get("overrides") or row.get("args") or {} for row in rows}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        translation.note("megatron-config-path", f"{file}: {error!r}; set roles.critic.*", trains=True)
        return
    for key, value in overrides.get("actor", {}).items():
        translation.given[key.replace("_", "-")] = [] if value is True else [str(value)]
    for key, value in overrides.get("critic", {}).items():
        if key in OptimizerOverrides.model_fields:
            translation.put(f"roles.critic.{key}", value)
        else:
            translation.note(
                "megatron-config-path", f"{key} of the critic: not an option of a role; see roles.critic.*", trains=True
            )


def balance(translation: Translation) -> None:
    """Megatron's kind of balance loss by default is aux_loss; here there is none unless it is set."""
    given = translation.given.get("moe-aux-loss-coeff", [])
    if translation.backend == "megatron" and any(float(word or 0) for word in given if is_number(word)):
        translation.given.setdefault("moe-router-load-balancing-type", ["aux_loss"])


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
