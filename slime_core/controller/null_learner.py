"""NullLearner: replaces the learner in a run that only generates (`--debug-rollout-only`)."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.metrics import step_rollout_metrics
from slime_core.config.run import DebugConfig
from slime_core.types.report import TrainReport
from slime_core.types.sample import SampleGroup


class NullLearner:
    """Reports the metrics of rollouts; the policy version stays as it is."""

    def __init__(self, logged: DebugConfig) -> None:
        self._logged = logged

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        batch = build_batch(groups)
        samples = [sample for group in groups for sample in group.samples]
        return TrainReport(
            version=version,
            steps=(),
            rollout=step_rollout_metrics(self._logged, batch, samples, version),
            perf={"perf/train_time": 0.0, "perf/train_tokens": 0.0},
        )
