"""The adapters that a trainer holds over its frozen base: each with matrices, gradients and an optimizer of its own.

Every rank holds them whole, beside the sharded base: they are small, and the sums of their gradients are one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig, OptimizerDriver
from slime_core.errors import ConfigError
from slime_fsdp.config import FsdpConfig
from slime_fsdp.optimizer import optimizer_of, optimizer_tensors
from slime_fsdp.optimizer_step import OptimizerStep
from slime_training.adapters.folder import (
    AdapterCopy,
    copied,
    read_adapter_folder,
    read_optimizer_file,
    require_fit,
    write_adapter_folder,
)
from slime_training.adapters.low_rank import LowRank, LowRankLayers
from slime_training.adapters.shape import AdapterShape, adapted_layers
from slime_training.finite_state import StateTensor


@dataclass(kw_only=True, eq=False)
class HeldAdapter:
    shape: AdapterShape
    low_rank: LowRank
    parameters: Mapping[str, nn.Parameter]
    """The same matrices, by the names of `LowRank.tensors`."""
    optimizer: torch.optim.Optimizer
    driver: type[OptimizerDriver]
    steps_done: int = 0
    step: OptimizerStep | None = None
    """See `Trainer.step`."""

    def trained(self) -> list[nn.Parameter]:
        return list(self.parameters.values())

    def state_tensors(self) -> dict[str, Tensor]:
        """Of the optimizer, by name."""
        return optimizer_tensors(self.optimizer, self.driver, {id(p): name for name, p in self.parameters.items()})

    def state(self) -> Iterator[StateTensor]:
        """Matrices and moments, for the check that all are finite."""
        for name, parameter in self.parameters.items():
            yield StateTensor(name=f"weight {name}", tensor=parameter.detach())
        for name, tensor in self.state_tensors().items():
            yield StateTensor(name=name, tensor=tensor)

    def tensors(self) -> Iterator[Tensor]:
        """All that it has in memory, without gradients."""
        yield from (parameter.detach() for parameter in self.parameters.values())
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@dataclass(kw_only=True, eq=False)
class Accumulated:
    """What calls of `forward_backward` have added up."""

    step: OptimizerStep
    gradients: list[Tensor | None]

    @classmethod
    def taken(cls, held: HeldAdapter) -> Accumulated | None:
        """From the adapter, which has nothing then."""
        step, held.step = held.step, None
        if step is None:
            return None
        gradients = [parameter.grad for parameter in step.parameters]
        for parameter in step.parameters:
            parameter.grad = None
        return cls(step=step, gradients=gradients)

    def put_back(self, held: HeldAdapter) -> None:
        """In place of what the adapter has."""
        held.step = self.step
        for parameter, gradient in zip(self.step.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def add(self, held: HeldAdapter) -> None:
        """What a later call has added up."""
        later = held.step
        assert later is not None
        for parameter, gradient in zip(self.step.parameters, self.gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self.step.loss += later.loss
        for name, value in later.sums.items():
            self.step.sums[name] = self.step.sums[name] + value if name in self.step.sums else value
        held.step = self.step


@dataclass(kw_only=True, eq=False)
class HeldAdapters:
    model: nn.Module
    """The whole base, or its empty shards."""
    base: Path
    layers: LowRankLayers
    sizes: Mapping[str, tuple[int, int]]
    """Features out and in of the model's linear layers."""
    most: int
    device: torch.device
    new_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    driver: type[OptimizerDriver]
    held: dict[str, HeldAdapter] = field(default_factory=dict)
    used: HeldAdapter | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        base: Path,
        config: FsdpConfig,
        device: torch.device,
        chosen: ChosenOptimizer,
        keys: OptimizerConfig,
    ) -> HeldAdapters:
        linear = {name: one for name, one in model.named_modules() if type(one) is nn.Linear}
        return cls(
            model=model,
            base=base,
            layers=LowRankLayers(model),
            sizes={name: (one.out_features, one.in_features) for name, one in linear.items()},
            most=config.max_adapters or 0,
            device=device,
            new_optimizer=lambda parameters: optimizer_of(parameters, chosen, keys, config),
            driver=chosen.driver,
        )

    def use(self, name: str | None) -> None:
        self.used = None if name is None else self.named(name)

    def named(self, name: str) -> HeldAdapter:
        if name not in self.held:
            there = ", ".join(sorted(self.held)) or "none"
            raise ConfigError(f'adapter "{name}": this trainer does not hold it. It holds: {there}.')
        return self.held[name]

    def using(self, held: HeldAdapter | None) -> AbstractContextManager[None]:
        """Within, the model's forwards are this adapter's; None: the base's."""
        return self.layers.using(None if held is None else held.low_rank)

    def add(self, name: str, shape: AdapterShape, seed: int) -> None:
        self._require_room(name)
        self._hold(name, self._made(shape, LowRank.fresh(adapted_layers(self.model, shape), shape, seed=seed)))

    def load(self, name: str, folder: Path, optimizer: bool) -> int:
        """Nothing is held after an error."""
        self._require_room(name)
        low_rank, shape = read_adapter_folder(folder)
        require_fit(low_rank, self.sizes, str(folder))
        held = self._made(shape, low_rank)
        if optimizer:
            self._read_optimizer(held, folder)
        self._hold(name, held)
        return held.steps_done

    def remove(self, name: str) -> None:
        if self.used is self.held.pop(name, None):
            self.used = None

    def save(self, name: str, folder: Path, optimizer: bool) -> None:
        held = self.named(name)
        write_adapter_folder(
            folder,
            held.low_rank,
            held.shape,
            base=self.base,
            optimizer=held.state_tensors() if optimizer else None,
            steps=held.steps_done,
        )

    def copy(self, name: str, optimizer: bool) -> AdapterCopy:
        held = self.named(name)
        state = held.state_tensors() if optimizer else None
        return AdapterCopy(
            low_rank=held.low_rank.map(copied),
            shape=held.shape,
            base=self.base,
            optimizer=None if state is None else {name: copied(tensor) for name, tensor in state.items()},
            steps=held.steps_done,
        )

    def _require_room(self, name: str) -> None:
        if name in self.held:
            raise ConfigError(
                f'adapter "{name}": the name is in use. Remove that adapter first, or choose another name.'
            )
        if len(self.held) >= self.most:
            raise ConfigError(
                f'adapter "{name}": this trainer holds {len(self.held)} already. Remove one, or set a larger '
                "backend.max_adapters."
            )

    def _hold(self, name: str, held: HeldAdapter) -> None:
        self.held[name] = held
        self.layers.prepare(held.low_rank)

    def _made(self, shape: AdapterShape, low_rank: LowRank) -> HeldAdapter:
        # In the order of the model, wherever it comes from: sums over its matrices are added in it.
        ordered = {name: low_rank.layers[name] for name in self.sizes if name in low_rank.layers}
        low_rank = replace(low_rank, layers=ordered).map(
            lambda matrix: nn.Parameter(matrix.to(self.device, torch.float32))
        )
        parameters = {name: matrix for name, matrix in low_rank.tensors().items() if isinstance(matrix, nn.Parameter)}
        optimizer = self.new_optimizer(list(parameters.values()))
        return HeldAdapter(
            shape=shape, low_rank=low_rank, parameters=parameters, optimizer=optimizer, driver=self.driver
        )

    def _read_optimizer(self, held: HeldAdapter, folder: Path) -> None:
        targets = held.state_tensors()
        if not self.driver.state_before_steps:
            raise ConfigError(
                f"{folder}: {self.driver.__name__} creates its state in its first step, so that there is nothing to load into. "
                "Load it without its optimizer (optimizer=False)."
            )
        found, held.steps_done = read_optimizer_file(folder, targets)
        for name, target in targets.items():
            target.copy_(found[name])


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Over all ranks, in one collective. A parameter without a gradient gets a zero one."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if group is None or group.size() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])
