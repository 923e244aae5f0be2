"""Sample: a prompt with one answer; SampleGroup: all answers to one prompt draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slime_core.types.prompt import Prompt
from slime_core.types.routed_experts import RoutedExperts


class Status(StrEnum):
    """How a sample ended. `FAILED`: its generator raised and no retry was left."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class VersionSpan(NamedTuple):
    """Response tokens `[start, end)` were sampled by policy `version`."""

    version: int
    start: int
    end: int


class SpanReward(NamedTuple):
    """A process reward's number for response tokens `[start, end)`."""

    start: int
    end: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trajectory, or a part of one: samples of one `rollout_id` count as one rollout.

    T = P + R tokens, P >= 1 of the prompt, R >= 0 of the response. All vectors over the response have length R.
    """

    index: int
    """Number of the answer in the run, increasing in submission order; what a generator makes of one answer shares it."""
    group_index: int
    rollout_id: int
    """Samples with equal ids are parts of one trajectory: they are averaged together and trained in one step."""
    prompt: Prompt
    tokens: npt.NDArray[np.int32]
    """(T,) prompt and response."""
    prompt_length: int
    loss_mask: npt.NDArray[np.uint8]
    """(R,) 1 = trained. Tokens that a tool or the environment wrote are 0."""
    rollout_log_probs: npt.NDArray[np.float32]
    """(R,) nats, under the policy that sampled, at the sampling temperature; 0 where the mask is 0."""
    response: str = ""
    spans: tuple[VersionSpan, ...] = ()
    """Which policy version wrote which response tokens, in order."""
    status: Status = Status.COMPLETED
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What a reward returned beside the number that is trained on."""
    span_rewards: tuple[SpanReward, ...] = ()
    """Parts of `reward` that belong to spans of the response."""
    credit_key: int | None = None
    """Samples with equal keys are normalised together; None: the group index."""
    remove_sample: bool = False
    """Counts in its group's statistics, trains nothing."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: RoutedExperts | None = None
    """(F, layers, top_k) expert ids of the first F <= T - 1 tokens, those that the engine has read: tokens behind the last that
    it wrote are never among them. None: nobody told."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What its generator counted, such as turns and calls of tools; their means are metrics."""

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def response_tokens(self) -> npt.NDArray[np.int32]:
        # From P on, never [-R:]: with R = 0 that would be the whole sequence.
        return self.tokens[self.prompt_length :]

    @property
    def num_trainable(self) -> int:
        return 0 if self.remove_sample else int(self.loss_mask.sum())

    def oldest_version(self, default: int) -> int:
        """The lowest policy version among its spans; `default` for an empty response."""
        return min((span.version for span in self.spans), default=default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGroup:
    """All samples of one prompt draw, in order of `Sample.index`."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def group_index(self) -> int:
        return self.prompt.group_index

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored samples, in order."""
        return [sample.reward for sample in self.samples if sample.reward is not None]
