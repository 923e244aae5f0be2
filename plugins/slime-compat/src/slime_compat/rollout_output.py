"""What old rollout functions return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Any]]
    """Samples by group; a group may have lists of samples, one for each response."""
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(function: Callable[..., Any], *args: Any, evaluation: bool, **options: Any) -> Any:
    """Also accepts functions that return the bare samples."""
    output = function(*args, **options, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)
