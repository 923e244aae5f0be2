"""Rules for `data` and `rollout`."""

from __future__ import annotations

import json
from typing import Final

from slime_compat.translation import Translation

UNBOUNDED_STALENESS: Final = 1000


def data(translation: Translation) -> None:
    for name, path in (
        ("apply-chat-template-kwargs", "data.apply_chat_template_kwargs"),
        ("multimodal-keys", "data.multimodal_keys"),
    ):
        words = translation.given.get(name)
        translation.done.add(name)
        if words:
            try:
                translation.put(path, json.loads(" ".join(words)))
            except ValueError as error:
                translation.note(name, f"not valid JSON: {error}", trains=True)
    if translation.take("streaming-data"):
        translation.put("data.streaming", True)
    sets = translation.given.get("eval-prompt-data")
    if sets is not None and len(sets) == 1:
        # Upstream names a set without a name so.
        translation.given["eval-prompt-data"] = ["aime", *sets]
    translation.put("rollout.rollout_seed", translation.number("rollout-seed", int, 42))


def rollout(translation: Translation) -> None:
    if translation.line.asynchronous:
        translation.put("rollout.max_async_level", 1)
    temperature = translation.number("temperature", float, None)
    if temperature is not None:
        translation.put("rollout.rollout_temperature", temperature)
    if translation.take("partial-rollout"):
        # Upstream does not limit the age of tokens.
        translation.put("rollout.partial_rollout", True)
        translation.put("rollout.max_staleness", UNBOUNDED_STALENESS)
    path = translation.given.get("rollout-function-path", [""])[-1]
    if path.endswith("generate_rollout_fully_async"):
        translation.take("rollout-function-path")
        translation.put("rollout.max_async_level", 2)
        translation.put("rollout.max_staleness", UNBOUNDED_STALENESS)
        translation.note(
            "rollout-function-path",
            f"{path}: rollouts run at most 2 steps ahead (rollout.max_async_level); upstream has no limit",
        )
