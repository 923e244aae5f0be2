"""Reports of the library: of one optimizer step, and of a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepReport:
    """One optimizer step, over all ranks. The numbers are the policy's."""

    step: int
    """Its number, from 0, over the whole run."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """Loss or norm was not finite: nothing was changed."""
    metrics: Mapping[str, float]
    """Of every role that took the step, as trackers name them: `train/loss`, `train/critic-value_loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run that has ended."""

    folder: Path
    """Run folder, with metrics, checkpoints and `hf/`."""
    steps: int
    """Rollout steps, over all attempts."""
    seconds: float
    """Wall-clock time of training, over all attempts."""
    tokens: int
    """Trained tokens, prompts included."""
    eval_before: Mapping[str, float] = field(default_factory=dict)
    """Mean reward on each evaluation set before the first step."""
    eval_after: Mapping[str, float] = field(default_factory=dict)
    """And at the end."""
    ended_early: str | None = None
    """Why there were fewer steps than asked for; None: there were not."""
    resolved: Mapping[str, str] = field(default_factory=dict)
    """The plugin of every name of the run, with distribution and version."""
