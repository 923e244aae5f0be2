"""OptimizerDriver: which optimizer a backend steps with; OptimizerConfig: its keys that every backend understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field

from slime_core.contracts.driver import Driver, DriverConfig
from slime_core.contracts.table import Table

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class OptimizerKeys(Table):
    """What every backend understands. The kernel owns these names, whatever the backend calls them."""

    lr: float = Field(1e-6, gt=0)
    """Highest learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Where decay ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    lr_warmup_iters: int = Field(0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_decay_iters: int | None = Field(None, gt=0)
    """Optimiser steps until min_lr; by default those of the whole run."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled; not applied to vectors (norms, biases)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(1.0, ge=0)
    """Global gradient norm is cut to this; 0: never."""


class OptimizerConfig(OptimizerKeys):
    """The keys, with the name of the optimizer that they are for."""

    optimizer: str = "adam"
    """Entry point in slime.optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedState:
    """Weights or moments are kept in bfloat16; what each moment is kept in."""

    exp_avg: Literal["fp32", "bf16"]
    exp_avg_sq: Literal["fp32", "bf16"]


class OptimizerFactory(Protocol):
    """What an OptimizerDriver builds."""

    def __call__(
        self, groups: Sequence[dict[str, Any]], config: OptimizerConfig, rounded: RoundedState | None = None
    ) -> Optimizer:
        """`groups`: parameter groups with their `weight_decay`; parameters may be DTensors. The backend clips gradients and
        sets `lr` of every group before each step. `rounded` only where `OptimizerDriver.rounds_state`."""


class OptimizerDriver(Driver[OptimizerFactory]):
    """Chosen by train.optimizer. The simplest one sets `Config`, and builds a function that makes a torch optimizer."""

    native: ClassVar[str | None] = None
    """The same optimizer's name in training libraries. A backend whose library brings its own optimizers takes the library's,
    and refuses an optimizer that its library does not have."""
    rounds_state: ClassVar[bool] = False
    """The factory takes `rounded`."""
    moments: ClassVar[tuple[str, ...] | None] = None
    """What a table of memory calls the tensors of a parameter's size that its state has; None: not told."""
    state_before_steps: ClassVar[bool] = False
    """`state_of` makes the state that no step has made yet. Off: a checkpoint has what steps have made so far."""

    @classmethod
    def state_of(cls, optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Tensor]:
        """The state of a parameter, for a checkpoint: tensors alone, under names without dots."""
        state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenOptimizer:
    """A driver with its options."""

    driver: type[OptimizerDriver]
    options: DriverConfig
