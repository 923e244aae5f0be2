"""Rules for `reward`: verl's functions of (data_source, solution_str, ground_truth, extra_info) run unchanged."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import OVERLONG

KWARGS: Final = "custom_reward_function.reward_kwargs."
MANAGERS: Final = ("naive", "prime", "dapo")
"""They call the function for each response. prime does so in processes of its own."""


def reward(translation: PeerTranslation) -> None:
    manager = translation.text("reward_model.reward_manager")
    if manager not in MANAGERS:
        translation.note(
            "reward_model.reward_manager",
            f"{manager}: the function is called for each response here, as by {', '.join(MANAGERS)}",
            trains=True,
        )
    path, name = translation.value("custom_reward_function.path"), translation.text("custom_reward_function.name")
    options = {key: translation.value(key) for key in translation.given if key.startswith(KWARGS)}
    if translation.switch("reward_model.enable"):
        of_model(translation)
    elif path is not None:
        kwargs = {key.removeprefix(KWARGS): value for key, value in options.items()}
        table: dict[str, Any] = {"name": "verl", "path": str(path), "function": name}
        translation.put("reward", table | ({"reward_kwargs": kwargs} if kwargs else {}))
    else:
        translation.put("reward", {"name": "verl", "path": "verl"})
        translation.note(
            "custom_reward_function.path",
            "not set: verl's own functions score by data_source, so verl must be installed where the run's rewards are; or "
            "choose a reward of slime (slime plugins), with data.label_key",
        )
    overlong(translation, manager)


def of_model(translation: PeerTranslation) -> None:
    load = translation.text("reward_model.model.path")
    size = translation.number("reward_model.rollout.tensor_model_parallel_size", int)
    translation.put("engines.reward", {"load": load, "num_gpus": size, "num_gpus_per_engine": size})
    translation.put("reward.name", "served")
    translation.note(
        "reward_model.enable", f"the reward model is served on {size} GPUs of its own: set engines.reward.num_gpus"
    )


def overlong(translation: PeerTranslation, manager: str) -> None:
    """The penalty for long responses of the reward manager dapo."""
    enabled = translation.switch(f"{OVERLONG}.enable")
    length, factor = translation.number(f"{OVERLONG}.len", int), translation.number(f"{OVERLONG}.penalty_factor", float)
    limit = translation.value("reward_model.reward_kwargs.max_resp_len")
    if not enabled or manager != "dapo":
        return
    shaping = {"name": "overlong", "overlong_buffer_len": length, "overlong_penalty_factor": factor}
    translation.put("algo.shaping", [shaping])
    if limit is not None and limit != translation.value("data.max_response_length"):
        translation.note(
            "reward_model.reward_kwargs.max_resp_len",
            f"{limit}: the limit is data.max_response_length here",
            trains=True,
        )
