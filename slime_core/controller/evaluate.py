"""Evaluation: named sets, each with its own sampling and reward; accuracy, lengths, pass@k."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_core.algorithm.metrics import count_metrics, distribution, pass_at_k, reward_part_metrics
from slime_core.config.bound import BoundEvalSet
from slime_core.rollout.groups import GroupRunner, all_or_none
from slime_core.types.prompt import Prompt
from slime_core.types.report import EvalReport
from slime_core.types.sample import SampleGroup, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTask:
    """One set, ready to run."""

    settings: BoundEvalSet
    prompts: Sequence[Prompt]
    runner: GroupRunner


class Evaluator:
    """All sets of a run."""

    def __init__(self, tasks: Sequence[EvalTask]) -> None:
        self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    async def evaluate(self, rollout_id: int, version: int) -> tuple[EvalReport, Mapping[str, tuple[SampleGroup, ...]]]:
        """Runs all sets at once. Same weights, same seeds: same responses."""
        sets = await all_or_none([asyncio.create_task(self._run(task)) for task in self._tasks])
        groups = {task.settings.name: found for task, found in zip(self._tasks, sets, strict=True)}
        metrics: dict[str, float] = {}
        for task in self._tasks:
            metrics |= set_metrics(task.settings, groups[task.settings.name])
        metrics |= version_metrics([group for found in sets for group in found])
        return EvalReport(rollout_id=rollout_id, version=version, metrics=metrics), groups

    async def _run(self, task: EvalTask) -> tuple[SampleGroup, ...]:
        extra = task.settings.metadata_overrides
        prompts = [replace(prompt, metadata={**prompt.metadata, **extra}) for prompt in task.prompts]
        running = [task.runner.start(prompt) for prompt in prompts]
        return tuple(await all_or_none([group.task for group in running]))


def version_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """The lowest and the highest policy version of the tokens; they are equal unless a weight update came meanwhile."""
    versions = [span.version for group in groups for sample in group.samples for span in sample.spans]
    if not versions:
        return {}
    return {"eval/version_min": float(min(versions)), "eval/version_max": float(max(versions))}


def set_metrics(settings: BoundEvalSet, groups: Sequence[SampleGroup]) -> dict[str, float]:
    """The metrics eval/NAME and eval/NAME/*. A sample without a reward counts as not passed, and as reward 0."""
    samples = [sample for group in groups for sample in group.samples]
    name = f"eval/{settings.name}"
    rewards = np.array([0.0 if sample.reward is None else sample.reward for sample in samples])
    metrics = {
        name: float(rewards.mean()) if len(rewards) else 0.0,
        f"{name}-truncated_ratio": float(np.mean([s.status is Status.TRUNCATED for s in samples])) if samples else 0.0,
        **distribution(f"{name}/response_len", np.array([sample.response_length for sample in samples])),
        **reward_part_metrics(samples, name),
        **count_metrics(samples, f"{name}/count"),
    }
    failed = sum(sample.status is Status.FAILED for sample in samples)
    if failed:
        metrics[f"{name}-failed"] = float(failed)
    counts = np.array([len(group.samples) for group in groups])
    if len(counts) and counts.min() > 1:
        threshold = settings.pass_threshold
        correct = np.array([sum(r >= threshold for r in group.rewards) for group in groups])
        metrics |= {f"{name}-pass@{k}": value for k, value in pass_at_k(counts, correct).items()}
    return metrics
