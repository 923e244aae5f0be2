"""Drivers of the losses, which the entry points name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.loss import LossDriver, PolicyLoss

if TYPE_CHECKING:
    from slime_core.contracts.example import Example


class ImportanceSampling(LossDriver):
    """The policy gradient with an importance ratio that nothing clips: -rho A."""

    @classmethod
    def build(cls, config: DriverConfig) -> PolicyLoss:
        from slime_tinker.losses import ImportanceSamplingLoss

        return ImportanceSamplingLoss()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_tinker import examples

        return examples.IMPORTANCE_SAMPLING


class DroConfig(DriverConfig):
    beta: float = Field(0.05, ge=0, allow_inf_nan=False)
    """Strength of the quadratic term."""


class Dro(LossDriver):
    """DRO: -(l A - beta/2 (l - old)^2), a policy gradient with a quadratic penalty on the log-ratio."""

    Config = DroConfig
    regularized = True

    @classmethod
    def build(cls, config: DroConfig) -> PolicyLoss:
        from slime_tinker.losses import DroLoss

        return DroLoss(config.beta)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_tinker import examples

        return examples.DRO
