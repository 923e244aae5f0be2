"""Rules for functions by path, and for rewards by name."""

from __future__ import annotations

from slime_compat import generated_reward, known_flags
from slime_compat.translation import Translation


def functions(translation: Translation) -> None:
    """Functions by path become the plugins compat, with the flags as their `args`."""
    of_function = {"python_path": list(translation.line.python_path), "args": translation.args()}
    log_probs_count = "corrections" in translation.tables.get("algo", {}) or "use-rollout-logprobs" in translation.given
    judges = translation.given.get("custom-rm-path")
    if judges:
        group = {"group": True} if "group-rm" in translation.given else {}
        translation.put("reward", {"name": "compat", "path": judges[-1]} | group | of_function)
    generates = translation.given.get("custom-generate-function-path")
    if generates:
        missing = "error" if log_probs_count else "zero"
        table = {"name": "compat", "path": generates[-1], "missing_log_probs": missing}
        translation.put("generate", table | of_function)
    keeps = translation.given.get("dynamic-sampling-filter-path")
    if keeps and keeps[-1].startswith("slime.") and keeps[-1].endswith("check_reward_nonzero_std"):
        translation.put("rollout.filters", ["nonzero_std"])
    elif keeps:
        translation.put("rollout.filters", [{"name": "compat", "path": keeps[-1]} | of_function])


def reward(translation: Translation) -> None:
    translation.done |= {"custom-rm-path", "group-rm", "custom-generate-function-path", "dynamic-sampling-filter-path"}
    kind = translation.take("rm-type")
    url = translation.take("rm-url")
    if "custom-rm-path" in translation.given:
        return
    if kind is None:
        if "custom-generate-function-path" in translation.given:
            translation.put("reward", {"name": "compat", "path": generated_reward.PATH})
        elif translation.tables["algo"]["name"] not in ("sft", "opd"):
            translation.note(
                "rm-type",
                "no reward is set: pass --reward, or --reward-select-key if the data chooses the reward",
                trains=True,
            )
    elif kind not in known_flags.REWARDS:
        known = ", ".join(known_flags.REWARDS)
        translation.note(
            "rm-type",
            f"{kind}: no reward of this name. There are {known}, and compat for a function of your own",
            trains=True,
        )
    else:
        named = {"name": known_flags.REWARDS[kind]}
        translation.put("reward", named | ({"rm_url": url} if kind == "remote_rm" and url else {}))
