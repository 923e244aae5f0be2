"""Functions in the old form: examples for the contract kit, and the `generate` that old functions call."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_compat.filter_output import DynamicFilterOutput
from slime_compat.generate_state import GenerateState
from slime_compat.old_loss import get_log_probs_and_entropy
from slime_compat.old_sample import STATUS_OF_FINISH, Sample, Status
from slime_compat.old_source import DataSource
from slime_compat.requests import post
from slime_core.errors import RolloutError


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


def check_reward_nonzero_std(args: Any, samples: list[Sample], **options: Any) -> DynamicFilterOutput:
    """Drops groups whose rewards have a standard deviation of at most 1e-6."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > 1e-6
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **options: Any) -> DynamicFilterOutput:
    """The same, but keeps a group that the batch cannot do without."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


def _prepare_prompt_ids(sample: Sample, tokenizer: Any, processor: Any) -> list[int]:
    """Tokens to continue: those that the sample has, else the prompt's."""
    if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
        raise RolloutError("old generate functions get no images, and sample.multimodal_inputs has some.")
    return sample.tokens or list(tokenizer.encode(sample.prompt, add_special_tokens=False))


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


def remove_truncated(args: Any, groups: list[list[Sample]]) -> None:
    """Leaves responses that reached the limit out of the loss."""
    for sample in (sample for group in groups for sample in group):
        sample.remove_sample = sample.status is Status.TRUNCATED


def center_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Rewards minus the mean of the step; a sample without one counts as 0."""
    raw = [float(sample.get_reward_value(args) or 0) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [reward - mean for reward in raw]


def weighted_advantages(args: Any, rollout_data: dict[str, Any], columns: Sequence[str] = ()) -> None:
    """Rewards minus the mean of the batch (0 for a sample without one), times the probability of each token, minus the KL
    penalty. columns: further ones, whose exponentials weigh too."""
    rewards = rollout_data["rewards"]
    scored = [reward for reward in rewards if not math.isnan(reward)]
    mean = sum(scored) / max(len(scored), 1)
    advantages = []
    for sample, (reward, kl) in enumerate(zip(rewards, rollout_data["kl"], strict=True)):
        weight = sum(rollout_data[name][sample] for name in ("log_probs", *columns))
        credit = 0.0 if math.isnan(reward) else reward - mean
        advantages.append(credit * torch.exp(weight) - args.kl_coef * kl)
    rollout_data["advantages"] = rollout_data["returns"] = advantages


def advantages_by_reference(args: Any, rollout_data: dict[str, Any]) -> None:
    weighted_advantages(args, rollout_data, ["ref_log_probs"])


def advantages_by_value(args: Any, rollout_data: dict[str, Any]) -> None:
    weighted_advantages(args, rollout_data, ["values"])


def loss_of_ratios(
    args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Callable[[torch.Tensor], Any]
) -> tuple[Any, dict[str, Any]]:
    """Policy gradient with ratios, which weighs tokens of high entropy more, and the gap to the engine."""
    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    old = torch.cat(batch["log_probs"])
    change = (torch.cat(found["log_probs"]) - old).clamp(-20, 20)
    credit = torch.cat(batch["advantages"]) * (1 + torch.cat(found["entropy"]) / 2)
    pg_loss = sum_of_sample_mean(-change.exp() * credit)
    gap = sum_of_sample_mean(old - torch.cat(batch["rollout_log_probs"]))
    return pg_loss + gap / 4, {"gap": gap.clone().detach()}


def loss_with_reference(
    args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Callable[[torch.Tensor], Any]
) -> tuple[Any, dict[str, Any]]:
    """The same, and half the log-ratio to the reference times the advantage."""
    loss, log = loss_of_ratios(args, batch, logits, sum_of_sample_mean)
    _, found = get_log_probs_and_entropy(logits, args=args)
    apart = torch.cat(found["log_probs"]) - torch.cat(batch["ref_log_probs"])
    kl = sum_of_sample_mean(apart * torch.cat(batch["advantages"]))
    return loss + 0.5 * kl, log | {"kl_loss": kl.detach()}


def truncated_weights(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Truncated importance weights; tokens whose ratio is beyond `args.tis_veto` are rejected."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weights = ratio.clamp(0, args.tis_clip)
    keep = torch.cat(loss_masks) * (ratio <= args.tis_veto)
    return pg_loss * weights, list(keep.split([len(mask) for mask in loss_masks])), {"ratio": ratio}


def sum_of_tokens(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[torch.Tensor], per_token: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sum over all trained tokens."""
    return lambda loss: (loss * torch.cat([torch.zeros(0), *loss_masks])).sum()


class Countdown(DataSource):
    """Prompts 9=, 8=, ... 0=, and again."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.drawn = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        numbers = [9 - number % 10 for number in range(self.drawn, self.drawn + num_samples)]
        self.drawn += num_samples
        return [[Sample(prompt=f"{number}=", label=str(number), metadata={"number": number})] for number in numbers]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise RuntimeError("read-only")

    def save(self, rollout_id: int) -> None:
        Path(self.args.save, f"countdown_{rollout_id}.json").write_text(json.dumps(self.drawn), encoding="utf-8")

    def load(self, rollout_id: int | None = None) -> None:
        self.drawn = json.loads(Path(self.args.load, f"countdown_{rollout_id}.json").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return 10


def newest_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Takes the newest groups out of the buffer."""
    taken = buffer[::-1][:num_samples]
    del buffer[len(buffer) - len(taken) :]
    return taken
