"""A step of a run: prompts, responses, tokens at most, optimizer steps and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.config.bound import BoundRun
from slime_core.config.roles import BoundRole
from slime_core.data.model_folder import NO_LIMIT, context_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rollout step."""

    num_rollout: int | None
    """Steps of the run; None: the steps of `num_epoch` passes over the data."""
    num_epoch: int | None
    prompts: int
    responses_per_prompt: int
    responses: int
    max_prompt_tokens: int | None
    """None: nothing limits prompts, so the data decides."""
    max_response_tokens: int
    longest_sequence: int | None
    max_tokens: int | None
    """Tokens of all sequences of the step, at most."""
    optimizer_steps: int
    responses_per_optimizer_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """How a role's ranks cut an optimizer step."""

    dp_size: int
    cp_size: int
    tokens: int
    """Tokens of the largest trained micro-batch of a rank."""
    scored_tokens: int
    count: int
    """On one rank, at most."""
    known: bool
    """Off: prompts have no limit, so a longer sequence than is counted may come."""


def step_of(run: BoundRun) -> Step:
    rollout, train = run.config.rollout, run.config.train
    context = rollout.rollout_max_context_len
    prompt = rollout.rollout_max_prompt_len
    if prompt is None and context is not None:
        prompt = context - 1
    longest = None if prompt is None else prompt + rollout.rollout_max_response_len
    if longest is not None and context is not None:
        longest = min(longest, context)
    return Step(
        num_rollout=train.num_rollout,
        num_epoch=train.num_epoch,
        prompts=rollout.rollout_batch_size,
        responses_per_prompt=rollout.n_samples_per_prompt,
        responses=run.rollouts_per_batch,
        max_prompt_tokens=prompt,
        max_response_tokens=rollout.rollout_max_response_len,
        longest_sequence=longest,
        max_tokens=None if longest is None else longest * run.rollouts_per_batch,
        optimizer_steps=run.steps_per_rollout,
        responses_per_optimizer_step=run.global_batch_size,
    )


def micro_batches_of(run: BoundRun, role: BoundRole, step: Step, model_config: Mapping[str, Any]) -> MicroBatches:
    """The largest that the plan of a step could make: `max_tokens_per_gpu`, or one sequence that is longer."""
    train = run.config.train
    layout = role.backend.driver.layout(role.backend.config, 0, role.num_ranks)
    longest = step.longest_sequence or min(
        context_length(model_config) or NO_LIMIT, run.config.rollout.rollout_max_context_len or NO_LIMIT
    )
    known = step.longest_sequence is not None

    def largest(max_tokens: int, responses: int) -> tuple[int, int]:
        """Tokens of a micro-batch on a rank, and how many there may be."""
        on_rank = -(-responses // layout.dp_size)
        if not train.use_dynamic_batch_size:
            samples = min(train.micro_batch_size, on_rank)
            return -(-samples * longest // layout.cp_size), -(-on_rank // samples)
        if not known:
            return max_tokens, on_rank
        all_of_rank = -(-on_rank * longest // layout.cp_size)
        tokens = min(max(max_tokens, -(-longest // layout.cp_size)), all_of_rank)
        # First fit leaves no two that would fit together.
        return tokens, min(on_rank, max(1, -(-2 * all_of_rank // tokens) - 1))

    tokens, count = largest(train.max_tokens_per_gpu, step.responses_per_optimizer_step)
    scored, _ = largest(train.log_probs_max_tokens_per_gpu or train.max_tokens_per_gpu, step.responses)
    return MicroBatches(
        dp_size=layout.dp_size,
        cp_size=layout.cp_size,
        tokens=tokens,
        scored_tokens=scored,
        count=count,
        known=known or not train.use_dynamic_batch_size,
    )
