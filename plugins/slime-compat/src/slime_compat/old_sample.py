"""Sample as old functions use it: a writable record, made from the kernel's sample and converted back by the generator."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample as KernelSample


class Status(Enum):
    """How generation ended, with upstream's values."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """All attributes can be set. What a generate function sets becomes a sample of the run; what a reward or a filter sets is
    ignored, except `remove_sample` in a filter."""

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    """The rendered text of the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response; empty before generation."""
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    """A number, or a dict of numbers."""
    loss_mask: list[int] | None = None
    """One number per response token; None: all 1."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    """One number per response token, nats."""
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    rollout_id: int | None = None
    session_id: str | None = None

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The number that is trained on: in a dict, that of `args.reward_key`."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward


# Old functions write Sample.Status.COMPLETED.
Sample.Status = Status  # type: ignore[attr-defined]


def old_prompt(prompt: Prompt, index: int) -> Sample:
    """A sample without a response."""
    return Sample(
        group_index=prompt.group_index,
        index=index,
        rollout_id=index,
        prompt=prompt.text,
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(dict(prompt.metadata)),
    )


def old_sample(sample: KernelSample) -> Sample:
    """Converts the kernel's sample. Its reward is a dict if the reward had named numbers."""
    old = old_prompt(sample.prompt, sample.index)
    old.rollout_id = sample.rollout_id
    old.tokens = sample.tokens.tolist()
    old.response = sample.raw_response
    old.response_length = sample.response_length
    old.reward = dict(sample.reward_parts) or sample.reward
    old.loss_mask = sample.loss_mask.tolist()
    old.weight_versions = [str(span.version) for span in sample.spans]
    old.rollout_log_probs = sample.rollout_log_probs.tolist()
    old.remove_sample = sample.remove_sample
    old.status = Status(sample.status.value)
    old.metadata = copy.deepcopy(dict(sample.metadata))
    return old
