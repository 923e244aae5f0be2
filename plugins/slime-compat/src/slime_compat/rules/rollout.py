"""`data` and `rollout`."""

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
    translation.put("rollout.rollout_seed", translation.number("rollout-seed", int, 42))


def rollout(translation: Translation) -> None:
    if translation.line.asynchronous:
        translation.put("rollout.ahead", 1)
    temperature = translation.number("temperature", float, None)
    if temperature is not None:
        translation.put("rollout.rollout_temperature", temperature)
    if translation.take("partial-rollout"):
        # There tokens may be of any age.
        translation.put("rollout.partial_rollout", True)
        translation.put("rollout.max_staleness", UNBOUNDED_STALENESS)
    path = translation.given.get("rollout-function-path", [""])[-1]
    if path.endswith("generate_rollout_fully_async"):
        translation.take("rollout-function-path")
        translation.put("rollout.ahead", 2)
        translation.put("rollout.max_staleness", UNBOUNDED_STALENESS)
        translation.note(
            "rollout-function-path",
            f"{path}: rollouts run 2 steps ahead (rollout.ahead), which bounds what had no bound",
        )
