"""RolloutOnly: stands where the learner does in a run that only generates (`--debug-rollout-only`)."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.algorithm.build_batch import assemble
from slime_core.algorithm.metrics import step_rollout_metrics
from slime_core.config.run import DebugConfig
from slime_core.types.report import TrainReport
from slime_core.types.sample import SampleGroup


class RolloutOnly:
    """Reports what the rollouts say of themselves; the policy stays the version that it is."""

    def __init__(self, logged: DebugConfig) -> None:
        self._logged = logged

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        batch = assemble(groups)
        samples = [sample for group in groups for sample in group.samples]
        return TrainReport(
            version=version,
            steps=(),
            rollout=step_rollout_metrics(self._logged, batch, samples, version),
            perf={"perf/train_time": 0.0, "perf/train_tokens": 0.0},
        )
