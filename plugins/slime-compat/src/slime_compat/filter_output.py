"""What old filters return, and how old rollout functions ask them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """Returned by old filters instead of True or False."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(function: Callable[..., Any] | None, *args: Any, **options: Any) -> DynamicFilterOutput:
    if function is None:
        return DynamicFilterOutput(keep=True)
    output = function(*args, **options)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Groups that the batch cannot do without are kept."""
    is_needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not is_needed


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
