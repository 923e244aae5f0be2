"""Upstream's functions that score by --rm-type: each calls the reward of slime that the type names."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any, Final

import numpy as np

from slime_compat.known_flags import REWARDS
from slime_compat.loading import load_function
from slime_compat.old_sample import Sample
from slime_core import groups
from slime_core.contracts.reward import Reward, RewardFailure
from slime_core.errors import RewardError, unknown_name
from slime_core.registry.registry import Registry
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample as KernelSample
from slime_core.types.sample import SampleGroup

BOX: Final = "\\boxed{"
SCORED_CHARS: Final = 300
"""Upstream looks at the end of a solution alone."""
BOX_CHARS: Final = 100


async def async_rm(args: Any, sample: Sample, **options: Any) -> Any:
    """The reward of one sample: that of its custom_rm_path, of args.custom_rm_path, or of the rm_type in its metadata or in
    args. RewardError for a type that has no reward."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return await load_function(path)(args, sample, **options)
    kind = str((sample.metadata or {}).get("rm_type") or args.rm_type or "").strip()
    reward = named_reward(kind, args.rm_url)
    return await asyncio.to_thread(scored, reward, sample)


async def batched_async_rm(args: Any, samples: list[Sample], **options: Any) -> list[Any]:
    """The rewards of `samples`; args.custom_rm_path is called with all of them."""
    if args.custom_rm_path is not None:
        rewards: list[Any] = await load_function(args.custom_rm_path)(args, samples, **options)
        return rewards
    return list(await asyncio.gather(*(async_rm(args, sample, **options) for sample in samples)))


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """`score` (1 right, -1 wrong), `acc` and `pred` of a solution. strict_box_verify: its last box must have exactly the
    ground truth; else the reward `dapo` decides."""
    if pause_tokens_index is not None:
        raise RewardError("compute_score: pause_tokens_index is not supported by slime-compat. Leave it out.")
    solution = solution_str[-SCORED_CHARS:]
    if strict_box_verify:
        pred = boxed(solution[-BOX_CHARS:])
        right = pred == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
    found = scored(named_reward("dapo", None), Sample(response=solution, label=ground_truth, tokens=[0]))
    return {"score": found["score"], "acc": found["acc"] == 1, "pred": None}


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}; None if there is none or it is not closed."""
    start = text.rfind(BOX)
    depth = 0
    for at, letter in enumerate(text[start:] if start >= 0 else ""):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return text[start + len(BOX) : start + at]
    return None


@cache
def named_reward(kind: str, url: str | None) -> Reward:
    name = REWARDS.get(kind)
    if name is None:
        raise RewardError(unknown_name("rm_type", kind, "reward of upstream", list(REWARDS)))
    driver = Registry.from_environment().resolve(groups.REWARDS, name, where=f'rm_type = "{kind}", reward').driver
    built: Reward = driver.build(driver.Config(**({"rm_url": url} if name == "remote" else {})))
    return built


def scored(reward: Reward, old: Sample) -> Any:
    """A number, or a dict of numbers."""
    metadata = dict(old.metadata or {})
    prompt = Prompt(
        group_index=old.group_index or 0,
        text=str(old.prompt),
        token_ids=np.asarray(old.tokens[:1], np.int32),
        label=old.label,
        metadata=metadata,
    )
    sample = KernelSample(
        index=old.index or 0,
        group_index=prompt.group_index,
        rollout_id=old.index or 0,
        prompt=prompt,
        tokens=prompt.token_ids,
        prompt_length=len(prompt.token_ids),
        loss_mask=np.zeros(0, np.uint8),
        rollout_log_probs=np.zeros(0, np.float32),
        response=old.response,
        raw_response=old.response,
        metadata=metadata,
    )
    value = reward.score(SampleGroup(prompt=prompt, samples=(sample,)))[0]
    if isinstance(value, RewardFailure):
        raise RewardError(value.message)
    return dict(value) if hasattr(value, "keys") else value
