"""Sample: a prompt with one response; SampleGroup: all responses to one prompt draw."""

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
    """How a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """It reached a token limit."""
    ABORTED = "aborted"
    FAILED = "failed"
    """Its generator raised and no retry was left."""


class VersionSpan(NamedTuple):
    """Response tokens `[start, end)` were sampled by policy `version`."""

    version: int
    start: int
    end: int


class SpanReward(NamedTuple):
    """Process reward of response tokens `[start, end)`."""

    start: int
    end: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trajectory, or a part of one. T = P + R tokens, P >= 1 of the prompt, R >= 0 of the response."""

    index: int
    """Number of the response in the run, in submission order; all samples that a generator returns for it share it."""
    group_index: int
    rollout_id: int
    """Samples with equal ids are parts of one trajectory: they count as one rollout and are trained in one step."""
    prompt: Prompt
    tokens: npt.NDArray[np.int32]
    """(T,) prompt and response."""
    prompt_length: int
    loss_mask: npt.NDArray[np.uint8]
    """(R,) 1 = trained. Tokens of a tool or the environment have 0."""
    rollout_log_probs: npt.NDArray[np.float32]
    """(R,) nats, under the sampling policy at the sampling temperature; 0 where the mask is 0."""
    response: str = ""
    """Text of the response without special tokens, such as the end token: what rewards compare."""
    raw_response: str = ""
    """Text of all response tokens, special ones included; if not given: `response`."""
    spans: tuple[VersionSpan, ...] = ()
    """Policy versions of the response tokens, in order; no span: not sampled by a policy."""
    status: Status = Status.COMPLETED
    reward: float | None = None
    """Before shaping; None: not scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """All named numbers that the reward returned."""
    span_rewards: tuple[SpanReward, ...] = ()
    """Parts of `reward` that belong to spans of the response."""
    credit_key: int | None = None
    """Samples with equal keys are normalized together; None: the group index."""
    remove_sample: bool = False
    """True: it is not trained on, but counts in its group's statistics."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's, with additions of the generator."""
    routed_experts: RoutedExperts | None = None
    """(F, layers, top_k) expert ids of the first F <= T - 1 tokens, which were inputs of an engine's forward; tokens after the
    last sampled one are never included. None: not recorded."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counters of the generator, such as turns and tool calls; their means are metrics."""

    def __post_init__(self) -> None:
        if not self.raw_response:
            object.__setattr__(self, "raw_response", self.response)

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
        """Lowest policy version of its spans; `default` if it has none."""
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
