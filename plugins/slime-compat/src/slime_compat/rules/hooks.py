"""Rules for hooks by path that are called by the plugins compat."""

from __future__ import annotations

from typing import Any, Final

from slime_compat import known_flags
from slime_compat.rules.algorithm import MIS
from slime_compat.translation import Translation

OF_COLLECTOR: Final = {
    "rollout-function-path": "rollout_function_path",
    "rollout-sample-filter-path": "rollout_sample_filter_path",
    "rollout-all-samples-process-path": "rollout_all_samples_process_path",
    "custom-reward-post-process-path": "reward_post_process_path",
    "custom-convert-samples-to-train-data-path": "convert_samples_to_train_data_path",
}
"""Flag -> option of the collector compat."""
OF_FILES: Final = ("prompt-data", "rollout-shuffle", "apply-chat-template")
"""Flags that an old data source reads from args."""
GROUP_RELATIVE: Final = frozenset({"grpo", "gspo", "cispo"})


def claimed(translation: Translation) -> None:
    """Before the rule of flags with the same name: the hooks, and the flags that belong to an old data source."""
    translation.done |= known_flags.HOOKS
    if path_of(translation, "data-source-path") is None:
        return
    translation.put("data.source", "compat")
    translation.done.update(OF_FILES)


def hooks(translation: Translation) -> None:
    of_function = {"python_path": list(translation.line.python_path), "args": translation.args()}
    source = path_of(translation, "data-source-path")
    if source is not None:
        key = translation.tables["data"].get("input_key")
        translation.tables["data"] |= {"path": source} | of_function
        translation.tables["data"] |= {} if key is None else {"input_key": key}
    chooses = path_of(translation, "buffer-filter-path")
    if chooses is not None:
        translation.put("rollout.buffer_filter", {"name": "compat_buffer", "path": chooses} | of_function)
    generator_hooks(translation, of_function)
    # First: rewards are normalized by the recipe's own advantage alone.
    advantage(translation, of_function)
    collector(translation, of_function)
    corrections(translation, of_function)


def path_of(translation: Translation, flag: str) -> str | None:
    """None also for upstream's default, which is what happens here without a plugin."""
    words = translation.given.get(flag)
    return words[-1] if words and words[-1] not in known_flags.HARMLESS_DEFAULTS.get(flag, ()) else None


def generator_hooks(translation: Translation, of_function: dict[str, Any]) -> None:
    paths = translation.given.get("rollout-sample-hook-path")
    if not paths:
        return
    written = {"name": "compat", "path": "slime.rollout.sglang_rollout.generate", "missing_log_probs": "error"}
    table = translation.tables.get("generate") or written | of_function
    translation.put("generate", table | {"sample_hook_paths": list(paths)})


def collector(translation: Translation, of_function: dict[str, Any]) -> None:
    found = {option: path for flag, option in OF_COLLECTOR.items() if (path := path_of(translation, flag)) is not None}
    if str(found.get("rollout_function_path", "")).endswith("generate_rollout_fully_async"):
        # The rule of the rollout table has translated it.
        del found["rollout_function_path"]
    if not found:
        return
    translation.put("rollout.collector", {"name": "compat"} | found | of_function)
    if "rollout_function_path" in found and translation.tables["rollout"].pop("filters", None):
        translation.note(
            "dynamic-sampling-filter-path", "left out: a rollout function chooses its groups itself, as upstream"
        )
    if "reward_post_process_path" in found or "convert_samples_to_train_data_path" in found:
        given_rewards(translation)


def given_rewards(translation: Translation) -> None:
    """The function returns the rewards as they are trained on, so they are not normalized again."""
    estimator = translation.tables["algo"]["name"]
    if estimator in GROUP_RELATIVE and "advantage" not in translation.tables["algo"]:
        translation.put("algo.disable_rewards_normalization", True)
    elif estimator == "reinforce_plus_plus_baseline":
        translation.note(
            "custom-reward-post-process-path",
            "reinforce_plus_plus_baseline subtracts the group's mean here, also from the rewards that this function returns; "
            "pass --advantage-estimator reinforce_plus_plus",
            trains=True,
        )


def advantage(translation: Translation, of_function: dict[str, Any]) -> None:
    path = path_of(translation, "custom-advantage-function-path")
    if path is None:
        return
    algo = translation.tables["algo"]
    in_reward = translation.number("kl-coef", float, 0.0)
    name = "compat"
    if algo["name"] == "ppo":
        name = "compat_values"
    elif in_reward or "use-kl-loss" in translation.given:
        name = "compat_ref"
    args = of_function["args"] | {"kl_coef": in_reward}
    translation.put("algo.advantage", {"name": name, "path": path} | of_function | {"args": args})
    if in_reward:
        # Upstream computes `kl` for this function with every estimator.
        translation.notes = [note for note in translation.notes if note.flag != "--kl-coef"]
        translation.put("algo.kl_coef", in_reward)
        translation.put("algo.kl_reward_type", algo["kl_loss_type"])


def corrections(translation: Translation, of_function: dict[str, Any]) -> None:
    found = list(translation.tables["algo"].get("corrections", ()))
    weighs = path_of(translation, "custom-tis-function-path")
    if weighs is not None and weighs.endswith(MIS):
        weighs = None
    is_called = "use-tis" in translation.given or "get-mismatch-metrics" in translation.given
    if weighs is not None and is_called:
        args = of_function["args"] | {"use_tis": "use-tis" in translation.given}
        found.append({"name": "compat", "path": weighs} | of_function | {"args": args})
    elif weighs is not None:
        translation.note("custom-tis-function-path", "left out, since it has no effect without --use-tis upstream")
    reduces = path_of(translation, "custom-pg-loss-reducer-function-path")
    if reduces is not None:
        aggregation = translation.tables["algo"]["aggregation"]
        found.append({"name": "compat_reducer", "path": reduces, "aggregation": aggregation} | of_function)
    if found:
        translation.put("algo.corrections", found)
