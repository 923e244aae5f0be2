"""Functions in the old form: examples for the contract kit, and the `generate` that old functions call."""

from __future__ import annotations

from typing import Any

from slime_compat.filter_output import DynamicFilterOutput
from slime_compat.old_sample import Sample, Status
from slime_compat.requests import GenerateState, post

STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


async def reward(args: Any, sample: Sample) -> float:
    """1 for a response that begins with the label; an end token follows."""
    return float(sample.response.startswith(str(sample.label)))


async def rewards_of_group(args: Any, samples: list[Sample]) -> list[float]:
    return [await reward(args, sample) for sample in samples]


def equals_solution(prompts: list[str], completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    """A reward function as TRL calls it: 1 for the text of the column `solution`."""
    return [float(completion == text) for completion, text in zip(completions, solution, strict=True)]


def keep_unequal(args: Any, samples: list[Sample]) -> DynamicFilterOutput:
    """Drops groups whose samples have equal rewards."""
    rewards = {sample.get_reward_value(args) for sample in samples}
    return DynamicFilterOutput(keep=len(rewards) > 1, reason="equal_rewards")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One request, from the prompt or from what a partial rollout left."""
    state = GenerateState(args)
    tokens = sample.tokens or state.prompt_ids
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = Status.TRUNCATED
        return sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {
        "input_ids": list(tokens),
        "sampling_params": sampling_params | {"max_new_tokens": left},
        "return_logprob": True,
    }
    reply = await post(url, payload)
    meta = reply["meta_info"]
    written = [token for _, token, *_ in meta["output_token_logprobs"]]
    before = sample.rollout_log_probs or [], sample.loss_mask or []
    sample.tokens = [*tokens, *written]
    sample.response_length += len(written)
    sample.response += reply["text"]
    sample.rollout_log_probs = before[0] + [log_prob for log_prob, *_ in meta["output_token_logprobs"]]
    sample.loss_mask = before[1] + [1] * len(written)
    sample.weight_versions.append(meta["weight_version"])
    sample.status = STATUS_OF_FINISH[meta["finish_reason"]["type"]]
    return sample
