"""A group as columns: the vectors of all its samples in one array each, so that a message costs the same for any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from slime_core.errors import RolloutError
from slime_core.types.prompt import Prompt
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import Sample
from slime_rollout_workers.flat import SAMPLE, Flat

VECTORS: Final = frozenset({"tokens", "loss_mask", "rollout_log_probs", "routed_experts", "prompt"})
OTHER: Final = Flat(Sample, without=VECTORS)


class GroupColumns(NamedTuple):
    """S samples with T tokens each, R of the response; N and M: their sums."""

    tokens: npt.NDArray[np.int32]
    """(N,)"""
    loss_mask: npt.NDArray[np.uint8]
    """(M,)"""
    rollout_log_probs: npt.NDArray[np.float32]
    """(M,)"""
    lengths: tuple[tuple[int, int], ...]
    """T and R of each sample."""
    prompts: tuple[Prompt | None, ...]
    """None: the group's."""
    routed_experts: tuple[RoutedExperts | None, ...]
    others: tuple[tuple[Any, ...], ...]
    """The other fields of each sample."""

    @classmethod
    def of(cls, samples: Sequence[Sample], prompt: Prompt) -> GroupColumns:
        """`prompt`: the group's."""
        return cls(
            tokens=joined([sample.tokens for sample in samples], np.int32),
            loss_mask=joined([sample.loss_mask for sample in samples], np.uint8),
            rollout_log_probs=joined([sample.rollout_log_probs for sample in samples], np.float32),
            lengths=tuple((len(sample.tokens), len(sample.loss_mask)) for sample in samples),
            prompts=tuple(None if sample.prompt is prompt else sample.prompt for sample in samples),
            routed_experts=tuple(sample.routed_experts for sample in samples),
            others=tuple(map(OTHER.pack, samples)),
        )

    def samples(self, prompt: Prompt) -> list[Sample]:
        """The samples, whose vectors are parts of the columns."""
        ends = np.cumsum(np.asarray(self.lengths, np.int64).reshape(-1, 2), axis=0).tolist()
        return [
            OTHER.unpack(
                others,
                prompt=own or prompt,
                tokens=self.tokens[end - length : end],
                loss_mask=self.loss_mask[response_end - responded : response_end],
                rollout_log_probs=self.rollout_log_probs[response_end - responded : response_end],
                routed_experts=routed,
            )
            for (length, responded), (end, response_end), own, routed, others in zip(
                self.lengths, ends, self.prompts, self.routed_experts, self.others, strict=True
            )
        ]


def joined(vectors: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *vectors])


class RewardColumns(NamedTuple):
    """What scoring changed in the samples of a group, by field."""

    changes: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, before: Sequence[Sample], after: Sequence[Sample]) -> RewardColumns:
        return cls(tuple(changed(old, new) for old, new in zip(before, after, strict=True)))

    def applied(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        if len(samples) != len(self.changes):
            raise RolloutError(f"rewards of {len(self.changes)} samples arrived, and {len(samples)} samples.")
        return tuple(map(SAMPLE.replace, samples, self.changes))


def changed(old: Sample, new: Sample) -> dict[str, Any]:
    return {name: getattr(new, name) for name in OTHER.names if getattr(new, name) is not getattr(old, name)}
