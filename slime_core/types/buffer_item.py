"""BufferItem: a prompt on its way to the rollouts, with what is already known of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status


class ItemKind(StrEnum):
    """Why an item is there. FRESH ones come straight from the source and never wait."""

    FRESH = "fresh"
    RETURNED = "returned"
    """Prompt only: to be generated from the start."""
    PARTIAL = "partial"
    """Generation was broken off: finished samples are done, others go on from their tokens."""
    SURPLUS = "surplus"
    """All samples are finished and scored; there was no room in the step's batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferItem:
    prompt: Prompt
    kind: ItemKind
    samples: tuple[Sample, ...] = ()
    """What is kept so far, in order of `Sample.index`; none of FRESH and RETURNED items."""
    added_step: int | None = None
    """Rollout step that put it into the buffer."""
    start_rollout_id: int | None = None
    """Rollout step that first worked on this prompt draw."""

    def __post_init__(self) -> None:
        kept = self.kind in (ItemKind.PARTIAL, ItemKind.SURPLUS)
        if kept != bool(self.samples):
            raise ValueError(f"a {self.kind} item has {'at least one sample' if kept else 'no samples'}")

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version that wrote any of its tokens; None: no tokens yet."""
        return min((span.version for sample in self.samples for span in sample.spans), default=None)

    @property
    def group(self) -> SampleGroup:
        return SampleGroup(prompt=self.prompt, samples=self.samples)

    def begun(self, step: int) -> BufferItem:
        """The item in the hands of a step that works on it."""
        return self if self.start_rollout_id is not None else replace(self, start_rollout_id=step)

    def as_returned(self, step: int) -> BufferItem:
        """The same prompt draw, to be generated from the start."""
        return BufferItem(
            prompt=self.prompt, kind=ItemKind.RETURNED, added_step=step, start_rollout_id=self.start_rollout_id
        )

    def as_it_was(self, step: int) -> BufferItem:
        """As it was taken: to be generated from the start, or from what was kept before."""
        return replace(self, added_step=step) if self.samples else self.as_returned(step)

    def as_surplus(self, step: int, group: SampleGroup) -> BufferItem:
        """With its finished group."""
        return replace(self, kind=ItemKind.SURPLUS, samples=group.samples, added_step=step)

    def as_broken_off(self, step: int, samples: Sequence[Sample]) -> BufferItem:
        """With what there is of its answers: finished ones, and the tokens of the others."""
        kept = tuple(sample for sample in samples if sample.status is not Status.FAILED and is_begun(sample))
        if not kept:
            return self.as_returned(step)
        return replace(self, kind=ItemKind.PARTIAL, samples=kept, added_step=step)


def is_begun(sample: Sample) -> bool:
    """Whether there is anything to keep of it."""
    return sample.response_length > 0 or sample.status in (Status.COMPLETED, Status.TRUNCATED)
