"""Binding of an evaluation set: nothing is left to default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_core import groups
from slime_core.config.binder import Binder
from slime_core.config.bound import BoundEvalSet, BoundReward
from slime_core.config.part import BoundPlugin
from slime_core.config.run import RunConfig


def bind_eval_set(
    config: RunConfig, name: str, binder: Binder, rewards: tuple[BoundReward, ...], generate: BoundPlugin | None
) -> BoundEvalSet:
    """Precedence per field: set > eval.defaults > eval_* > rollout_* (or the data table's key)."""
    own, evals, rollout, data = config.eval.datasets[name], config.eval, config.rollout, config.data

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    def bound(group: str, field: str, run_wide: BoundPlugin | None) -> BoundPlugin | None:
        for where, given in ((f"eval.datasets.{name}", own), ("eval.defaults", evals.defaults)):
            if (table := getattr(given, field)) is not None:
                return binder.part(group, table, f"{where}.{field}")
        return run_wide

    def pick(field: str, *fallbacks: Any) -> Any:
        return first(getattr(own, field), getattr(evals.defaults, field), *fallbacks)

    def bound_rewards() -> tuple[BoundReward, ...]:
        own_part = bound(groups.REWARDS, "reward", None)
        key = pick("reward_key", evals.eval_reward_key, rollout.reward_key)
        if own_part is not None:
            return (BoundReward.alone(own_part, key),)
        return tuple(replace(reward, reward_key=key or reward.reward_key) for reward in rewards)

    fallback_temperature = first(evals.eval_temperature, rollout.rollout_temperature)
    return BoundEvalSet(
        name=name,
        path=own.path,
        num_samples=pick("n_samples_per_eval_prompt", evals.n_samples_per_eval_prompt),
        temperature=pick("temperature", fallback_temperature),
        top_p=pick("top_p", evals.eval_top_p, rollout.rollout_top_p),
        top_k=pick("top_k", evals.eval_top_k, rollout.rollout_top_k),
        max_response_len=pick("max_response_len", evals.eval_max_response_len, rollout.rollout_max_response_len),
        max_prompt_len=pick("max_prompt_len", evals.eval_max_prompt_len, rollout.rollout_max_prompt_len),
        min_new_tokens=pick("min_new_tokens", evals.eval_min_new_tokens),
        repetition_penalty=pick("repetition_penalty", 1.0),
        stop=pick("stop", rollout.rollout_stop),
        stop_token_ids=pick("stop_token_ids", rollout.rollout_stop_token_ids),
        rewards=bound_rewards(),
        generate=bound(groups.GENERATORS, "generate", generate),
        input_key=pick("input_key", evals.eval_input_key, data.input_key),
        label_key=pick("label_key", evals.eval_label_key, data.label_key),
        tool_key=pick("tool_key", evals.eval_tool_key, data.tool_key),
        metadata_key=pick("metadata_key", data.metadata_key),
        apply_chat_template=pick("apply_chat_template", data.apply_chat_template),
        pass_threshold=pick("pass_threshold", evals.pass_threshold),
        metadata_overrides=own.metadata_overrides,
    )
