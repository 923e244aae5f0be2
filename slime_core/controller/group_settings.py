"""GroupSettings from a run file: how many responses, sampled how, trained or evaluated."""

from __future__ import annotations

from slime_core.config.bound import BoundEvalSet, BoundRun
from slime_core.contracts.setup import RoutingReplay
from slime_core.rollout.groups import GroupSettings
from slime_core.rollout.scoring import ScoringPlan
from slime_core.types.completion import SamplingParams


def training_settings(run: BoundRun) -> GroupSettings:
    rollout = run.config.rollout
    return GroupSettings(
        scope="train",
        num_samples=rollout.n_samples_per_prompt,
        sampling=SamplingParams(
            max_new_tokens=rollout.rollout_max_response_len,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            stop=rollout.rollout_stop,
            stop_token_ids=rollout.rollout_stop_token_ids,
            skip_special_tokens=rollout.rollout_skip_special_tokens,
        ),
        seed=run.rollout_seed,
        max_context_len=rollout.rollout_max_context_len,
        scoring=ScoringPlan.of(run.rewards, rollout),
        evaluation=False,
        max_retries=rollout.max_retries,
        mask_offpolicy=rollout.mask_offpolicy_in_partial_rollout,
        routed_experts=run.routing_replay is RoutingReplay.ROLLOUT,
    )


def eval_settings(run: BoundRun, settings: BoundEvalSet) -> GroupSettings:
    rollout = run.config.rollout
    return GroupSettings(
        scope=f"eval-{settings.name}",
        num_samples=settings.num_samples,
        sampling=SamplingParams(
            max_new_tokens=settings.max_response_len,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_new_tokens=settings.min_new_tokens,
            repetition_penalty=settings.repetition_penalty,
            stop=settings.stop,
            stop_token_ids=settings.stop_token_ids,
            skip_special_tokens=rollout.rollout_skip_special_tokens,
        ),
        seed=run.rollout_seed,
        max_context_len=rollout.rollout_max_context_len,
        scoring=ScoringPlan.of(settings.rewards, rollout),
        evaluation=True,
        max_retries=rollout.max_retries,
    )
