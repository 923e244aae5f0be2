"""OptimizerDriver: the optimizer that a backend uses; OptimizerConfig: its keys, which every backend supports."""

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
    """Keys that every backend supports, under these names, whatever its library calls them."""

    lr: float = Field(1e-6, gt=0)
    """Highest learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Where decay ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    lr_warmup_iters: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1)
    """The warm-up as a share of the steps until min_lr, in place of lr_warmup_iters."""
    lr_decay_iters: int | None = Field(None, gt=0)
    """Optimizer steps until min_lr; by default those of the whole run."""
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

    def warmup_and_decay(self, total_steps: int) -> tuple[float, float]:
        """Optimizer steps until lr is reached, perhaps no whole number, and until min_lr is, in a run of `total_steps`."""
        decay = self.lr_decay_iters or total_steps
        warmup = self.lr_warmup_iters if self.lr_warmup_fraction is None else self.lr_warmup_fraction * decay
        return warmup, decay if decay > warmup else warmup + 1


class OptimizerConfig(OptimizerKeys):
    """The keys, with the name of the optimizer."""

    optimizer: str = "adam"
    """Entry point in slime.optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedState:
    """Dtypes of the moments where weights or moments are kept in bfloat16."""

    exp_avg: Literal["fp32", "bf16"]
    exp_avg_sq: Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of one optimizer step alone; None: the run's."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    clip_grad: float | None = None


class OptimizerFactory(Protocol):
    """Type of the function that an OptimizerDriver builds."""

    def __call__(
        self, groups: Sequence[dict[str, Any]], config: OptimizerConfig, rounded: RoundedState | None = None
    ) -> Optimizer:
        """Builds a torch optimizer; the backend clips gradients and sets each group's `lr` before each step. groups: torch's
        parameter groups with their `weight_decay`, and with `hidden` = True if they are matrices of the model's layers;
        parameters may be DTensors. rounded: only with `rounds_state`."""


class OptimizerDriver(Driver[OptimizerFactory]):
    """Chosen by train.optimizer. The simplest one sets `Config` and builds a function that returns a torch optimizer."""

    native: ClassVar[str | None] = None
    """Name of the same optimizer in training libraries. A backend whose library includes optimizers uses the library's, and
    refuses one that the library does not have. None: no library has it."""
    rounds_state: ClassVar[bool] = False
    """True: the factory accepts `rounded`."""
    needs_hidden: ClassVar[bool] = False
    """True: it steps on the groups with `hidden` in a way of its own."""
    moments: ClassVar[tuple[str, ...] | None] = None
    """Names, in a memory estimate, of its state tensors of the parameter's size; None: not estimated."""
    step_settings: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay", "clip_grad"})
    """Fields of `StepSettings` that it obeys; `betas` and `eps` are keys of its groups then."""
    state_before_steps: ClassVar[bool] = False
    """True: `state_of` creates state that no step has created yet. False: a checkpoint has the state created so far."""

    @classmethod
    def state_of(cls, optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Tensor]:
        """Returns the state of `parameter` for a checkpoint: only tensors, under names without dots."""
        state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenOptimizer:
    """A driver with its options."""

    driver: type[OptimizerDriver]
    options: DriverConfig
