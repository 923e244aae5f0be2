"""The optimizer of the trained parameters, the learning-rate schedule, sums of gradients and their norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig, OptimizerDriver, RoundedState, StepSettings
from slime_core.errors import CheckpointError, ConfigError
from slime_fsdp.config import FsdpConfig, optimizer_problems
from slime_fsdp.hidden_matrices import hidden_matrices
from slime_fsdp.packed_model import PackedModel
from slime_training.rounded_adamw import STORED, local


def make_optimizer(
    packed: PackedModel, chosen: ChosenOptimizer, config: OptimizerConfig, options: FsdpConfig
) -> torch.optim.Optimizer:
    """Weight decay is decoupled and not applied to vectors (norms, biases)."""
    trained = [parameter for parameter in packed.parameters() if parameter.requires_grad]
    if not trained and not options.max_adapters:
        raise ConfigError(
            "backend.freeze_params_name_list, only_train_params_name_list: they leave no parameter to train."
        )
    return optimizer_of(trained, chosen, config, options, hidden=hidden_matrices(packed.model))


def optimizer_of(
    trained: Sequence[nn.Parameter],
    chosen: ChosenOptimizer,
    config: OptimizerConfig,
    options: FsdpConfig,
    *,
    hidden: frozenset[int] = frozenset(),
) -> torch.optim.Optimizer:
    """Of these parameters, of which there may be none. hidden: ids of those that are marked so."""
    if problems := optimizer_problems(options, config.optimizer, chosen.driver):
        raise ConfigError(problems)
    matrices, decay = [p for p in trained if p.ndim > 1], config.weight_decay
    groups = [
        {"params": [p for p in matrices if id(p) in hidden], "weight_decay": decay, "hidden": True, "decays": True},
        {
            "params": [p for p in matrices if id(p) not in hidden],
            "weight_decay": decay,
            "hidden": False,
            "decays": True,
        },
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "hidden": False, "decays": False},
    ]
    # torch refuses an optimizer without groups.
    groups = [group for group in groups if group["params"]] or groups[:1]
    rounded = None
    if options.rounds_state:
        rounded = RoundedState(exp_avg=options.exp_avg_dtype, exp_avg_sq=options.exp_avg_sq_dtype)
    return chosen.driver.build(chosen.options)(groups, config, rounded)


def state_sizes(
    optimizer: torch.optim.Optimizer, driver: type[OptimizerDriver], options: FsdpConfig, device: str
) -> Iterator[int]:
    """Bytes of each tensor that the first step will add to the optimizer's state on the device of this type; none for
    optimizers that do not list their moments."""
    if optimizer.state or driver.moments is None:
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        weight = local(parameter.detach())
        if weight.device.type != device:
            continue
        kept_in = (STORED[options.exp_avg_dtype], STORED[options.exp_avg_sq_dtype])
        dtypes = kept_in if options.rounds_state else (weight.dtype,) * len(driver.moments)
        yield from (weight.numel() * dtype.itemsize for dtype in dtypes)
        # The number of its step.
        yield torch.float32.itemsize


def learning_rate(config: OptimizerConfig, steps_done: int, total_steps: int) -> float:
    """The learning rate of the optimizer step after `steps_done`: linear from 0 over the warm-up (so the first one is 0), then
    constant, or linear or cosine decay to min_lr at lr_decay_iters."""
    warmup, last = config.warmup_and_decay(total_steps)
    if steps_done < warmup:
        return config.lr * steps_done / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    ratio = min((steps_done - warmup) / (last - warmup), 1.0)
    left = 1.0 - ratio if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * ratio))
    return config.min_lr + (config.lr - config.min_lr) * left


def set_step(optimizer: torch.optim.Optimizer, config: OptimizerConfig, settings: StepSettings, lr: float) -> None:
    """The settings of the next step, in place of those of the one before."""
    betas = (config.adam_beta1, config.adam_beta2) if settings.betas is None else settings.betas
    eps = config.adam_eps if settings.eps is None else settings.eps
    decay = config.weight_decay if settings.weight_decay is None else settings.weight_decay
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = decay if group["decays"] else 0.0
        if "betas" in group:
            group.update(betas=betas, eps=eps)


class GradientSums:
    """float32 sums over micro-batches, for weights whose own gradients are bfloat16."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
        self._sums: dict[int, Tensor] = {}

    def take(self) -> None:
        """Adds the gradients of a micro-batch, except for the last one."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            if number in self._sums:
                self._sums[number] += gradient
            else:
                self._sums[number] = gradient.float()
            parameter.grad = None

    def give(self) -> None:
        """Adds the sums to the last gradients, so that they are rounded once."""
        for number, total in self._sums.items():
            parameter = self._parameters[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            gradient.copy_(total.add_(gradient))
        self._sums.clear()


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Global L2 norm, a float32 scalar that is the same on every rank. A collective where gradients are sharded."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.dtype == torch.bfloat16 for gradient in gradients):
        return norm_of_rounded(gradients)
    norm = torch.nn.utils.get_total_norm(gradients, 2.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def norm_of_rounded(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of sharded gradients; torch's own would be summed in bfloat16."""
    norms = torch._foreach_norm([local(gradient) for gradient in gradients], 2.0, dtype=torch.float32)
    squares = torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()
    meshes = {gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}
    for mesh in meshes:
        dist.all_reduce(squares, group=mesh.get_group())
    return squares.sqrt()


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, driver: type[OptimizerDriver], names: dict[int, str]
) -> dict[str, Tensor]:
    """All tensors of the optimizer's state, by the names of their parameters."""
    tensors = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = driver.state_of(optimizer, parameter)
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{driver.__name__}: its state {key} is {value!r}; a checkpoint holds only tensors."
                    )
            tensors |= {f"optimizer.{key}.{names[id(parameter)]}": value for key, value in state.items()}
    return tensors


def make_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], saved: Mapping[str, tuple[Sequence[int], torch.dtype]]
) -> None:
    """Creates the state that a checkpoint contains, for loading to write into, and replaces the state of earlier steps.
    `saved`: shapes and dtypes by the names of `optimizer_tensors`."""
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for name, (shape, dtype) in saved.items():
        key, _, of = name.removeprefix("optimizer.").partition(".")
        parameter = parameters.get(of)
        if not name.startswith("optimizer.") or parameter is None:
            continue
        if tuple(shape) == tuple(parameter.shape):
            value = torch.zeros_like(parameter, dtype=dtype)
        else:
            # torch's own optimizers keep the step count on the host.
            value = torch.zeros(tuple(shape), dtype=dtype, device=local(parameter).device if shape else "cpu")
        optimizer.state[parameter][key] = value
