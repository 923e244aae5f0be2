"""Drivers of the entry points in `slime.optimizers`. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import OptimizerConfig, OptimizerDriver, OptimizerFactory, RoundedState
from slime_optimizers.config import EightBitConfig, MuonConfig
from slime_optimizers.memory import of_8bit, of_muon
from slime_training.memory_plan import MemoryItem, OptimizerPlanner, SteppedTensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from slime_optimizers.adamw_8bit import EightBitAdamW
    from slime_optimizers.muon import Muon


class MuonDriver(OptimizerPlanner, OptimizerDriver):
    """Muon for the matrices of layers, AdamW for all else (embeddings, head, norms, biases)."""

    Config: ClassVar[type[DriverConfig]] = MuonConfig
    needs_hidden: ClassVar[bool] = True
    state_before_steps: ClassVar[bool] = True

    @classmethod
    def build(cls, options: MuonConfig) -> OptimizerFactory:
        from slime_optimizers.muon import Muon

        def make(
            groups: Sequence[dict[str, Any]], config: OptimizerConfig, rounded: RoundedState | None = None
        ) -> Muon:
            return Muon(groups, config, options)

        return make

    @classmethod
    def state_of(cls, optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Tensor]:
        return cast("Muon", optimizer).state_of(parameter)

    @classmethod
    def memory(
        cls, config: MuonConfig, tensors: Sequence[SteppedTensor], num_ranks: int, place: Literal["device", "host"]
    ) -> tuple[MemoryItem, ...]:
        return of_muon(tensors, num_ranks, place)


class EightBitDriver(OptimizerPlanner, OptimizerDriver):
    """AdamW with moments of 8 bits, with torchao's codes."""

    Config: ClassVar[type[DriverConfig]] = EightBitConfig
    state_before_steps: ClassVar[bool] = True

    @classmethod
    def build(cls, options: EightBitConfig) -> OptimizerFactory:
        from slime_optimizers.adamw_8bit import EightBitAdamW

        def make(
            groups: Sequence[dict[str, Any]], config: OptimizerConfig, rounded: RoundedState | None = None
        ) -> EightBitAdamW:
            return EightBitAdamW(groups, config, options)

        return make

    @classmethod
    def state_of(cls, optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Tensor]:
        return cast("EightBitAdamW", optimizer).state_of(parameter)

    @classmethod
    def memory(
        cls, config: EightBitConfig, tensors: Sequence[SteppedTensor], num_ranks: int, place: Literal["device", "host"]
    ) -> tuple[MemoryItem, ...]:
        return of_8bit(config, tensors, place)
