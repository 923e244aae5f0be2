"""BufferItem: a prompt that waits for a rollout, with its responses so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status


class ItemKind(StrEnum):
    """State of an item. FRESH ones come from the source and never wait in the buffer."""

    FRESH = "fresh"
    RETURNED = "returned"
    """Only the prompt: its responses are generated from the start."""
    PARTIAL = "partial"
    """Generation was interrupted: finished samples are kept, others continue from their tokens."""
    SURPLUS = "surplus"
    """All samples are finished and scored; the step's batch was full."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferItem:
    prompt: Prompt
    kind: ItemKind
    samples: tuple[Sample, ...] = ()
    """Samples so far, in order of `Sample.index`; empty for FRESH and RETURNED items."""
    added_step: int | None = None
    """Rollout step that put it into the buffer; None: FRESH."""
    start_rollout_id: int | None = None
    """Rollout step that first used this prompt draw; None: none yet."""

    def __post_init__(self) -> None:
        kept = self.kind in (ItemKind.PARTIAL, ItemKind.SURPLUS)
        if kept != bool(self.samples):
            raise ValueError(f"a {self.kind} item has {'at least one sample' if kept else 'no samples'}")

    @property
    def oldest_version(self) -> int | None:
        """Lowest policy version that sampled any of its tokens; None: no tokens yet."""
        return min((span.version for sample in self.samples for span in sample.spans), default=None)

    @property
    def group(self) -> SampleGroup:
        return SampleGroup(prompt=self.prompt, samples=self.samples)

    def start(self, step: int) -> BufferItem:
        """Marks the item as used by `step`, unless an earlier step used it."""
        return self if self.start_rollout_id is not None else replace(self, start_rollout_id=step)

    def as_returned(self, step: int) -> BufferItem:
        """The same prompt draw, to be generated from the start."""
        return BufferItem(
            prompt=self.prompt, kind=ItemKind.RETURNED, added_step=step, start_rollout_id=self.start_rollout_id
        )

    def as_it_was(self, step: int) -> BufferItem:
        """The item as it was before the step took it: without samples, or with those of an earlier step."""
        return replace(self, added_step=step) if self.samples else self.as_returned(step)

    def as_surplus(self, step: int, group: SampleGroup) -> BufferItem:
        """The item with its finished group."""
        return replace(self, kind=ItemKind.SURPLUS, samples=group.samples, added_step=step)

    def as_partial(self, step: int, samples: Sequence[Sample]) -> BufferItem:
        """The item with its responses so far: finished ones, and the tokens of the others."""
        # Keeping those without a token would save no work.
        ended = (Status.COMPLETED, Status.TRUNCATED)
        kept = tuple(s for s in samples if s.status in ended or (s.response_length and s.status != Status.FAILED))
        if not kept:
            return self.as_returned(step)
        return replace(self, kind=ItemKind.PARTIAL, samples=kept, added_step=step)
