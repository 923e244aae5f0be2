"""Drivers of the entry points in `slime.optimizers`. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.optimizer import OptimizerDriver, OptimizerFactory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class AdamDriver(OptimizerDriver):
    """AdamW."""

    native: ClassVar[str | None] = "adam"
    step_settings: ClassVar[frozenset[str]] = OptimizerDriver.step_settings | {"betas", "eps"}
    rounds_state: ClassVar[bool] = True
    moments: ClassVar[tuple[str, ...] | None] = ("first moment", "second moment")
    state_before_steps: ClassVar[bool] = True

    @classmethod
    def build(cls, config: Any) -> OptimizerFactory:
        from slime_training.adam import make_adam

        return make_adam

    @classmethod
    def state_of(cls, optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Tensor]:
        from slime_training.adam import adam_state

        return adam_state(optimizer, parameter)


class SgdDriver(OptimizerDriver):
    """Plain stochastic gradient descent without momentum."""

    native: ClassVar[str | None] = "sgd"
    moments: ClassVar[tuple[str, ...] | None] = ()
    state_before_steps: ClassVar[bool] = True

    @classmethod
    def build(cls, config: Any) -> OptimizerFactory:
        from slime_training.sgd import make_sgd

        return make_sgd

    @classmethod
    def state_of(cls, optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Tensor]:
        return {}
