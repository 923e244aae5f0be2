"""Rules for `trackers`, and for dumps."""

from __future__ import annotations

from typing import Any

from slime_compat.translation import SECRETS, Translation


def trackers(translation: Translation) -> None:
    chosen: list[Any] = ["jsonl"]
    for name, prefixes in (("tensorboard", ("tb-",)), ("wandb", ("wandb-", "disable-wandb-"))):
        used = translation.take(f"use-{name}") is not None
        options = {}
        for flag in [f for f in translation.given if f.startswith(prefixes)]:
            word = translation.take(flag)
            if flag in SECRETS:
                translation.note(flag, "a run file must contain no secrets: set WANDB_API_KEY, or wandb_key_file")
            elif flag != "wandb-run-id" or word:
                options[flag.replace("-", "_")] = True if word == "true" else word
        if used:
            chosen.append({"name": name} | options)
    if len(chosen) > 1:
        translation.put("trackers", chosen)
    if translation.take("save-debug-rollout-data") or translation.take("dump-details"):
        translation.put("rollout.dump_rollouts", True)
    if translation.take("save-debug-train-data") or "dump-details" in translation.given:
        translation.put("debug.save_debug_train_data", True)
