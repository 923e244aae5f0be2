"""Megatron's optimizer and learning-rate schedule, from the run's own keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.errors import ConfigError
from slime_megatron.config import MegatronOptions, megatron_options
from slime_megatron.cpu import float_types_of_cuda
from slime_megatron.model_chunks import Placement
from slime_megatron.offload import as_plain_adamw, require_offload
from slime_megatron.options import OPTIMIZER
from slime_training.finite_state import StateTensor
from slime_training.rounded_adamw import STORED, StochasticRoundingAdamW


def make_optimizer(
    chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    options: MegatronOptions,
    placement: Placement,
    *,
    distributed: bool,
) -> MegatronOptimizer:
    """Weight decay is decoupled and not applied to vectors (norms, biases)."""
    if not any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()):
        raise ConfigError(
            "backend.freeze_params_name_list, only_train_params_name_list: no parameter is left to train."
        )
    fields: dict[str, Any] = {
        "sgd_momentum": 0.0,
        # Megatron's initial loss scale is 2**32, with which a dozen steps would be skipped.
        "initial_loss_scale": 2.0**16,
        **megatron_options(options, OPTIMIZER),
        "optimizer": config.optimizer,
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_eps": config.adam_eps,
        "clip_grad": config.clip_grad,
        "use_distributed_optimizer": distributed,
        # Not for an optimizer that steps on the weights themselves: Megatron would create a float32 copy.
        "bf16": placement.dtype == torch.bfloat16 and options.main_params_dtype == "fp32",
        "fp16": placement.dtype == torch.float16,
        "params_dtype": placement.dtype,
    }
    if fields.get("optimizer_cpu_offload"):
        require_offload(fields, placement.device)
        fields["optimizer_offload_fraction"] = 1.0
    if fields["sgd_momentum"] and config.optimizer != "sgd":
        raise ConfigError(
            f'train.optimizer = "{config.optimizer}": it has no sgd_momentum. Leave backend.sgd_momentum out.'
        )
    if options.rounds_state and config.optimizer != "adam":
        raise ConfigError(
            f'train.optimizer = "{config.optimizer}": it has no moments, and float32 weights. Leave backend.main_params_dtype, '
            "exp_avg_dtype and exp_avg_sq_dtype out."
        )
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    with float_types_of_cuda(parameters) if placement.device.type == "cpu" else nullcontext():
        optimizer = get_megatron_optimizer(MegatronOptimizerConfig(**fields), list(chunks))
    for part in parts_of(optimizer):
        as_plain_adamw(part)
        if isinstance(part.optimizer, torch.optim.Adam):
            fuse(part.optimizer)
    if options.rounds_state:
        for part in parts_of(optimizer):
            if part.optimizer is not None:
                part.optimizer = with_rounded_state(part.optimizer, config, options)
    if options.main_params_dtype == "bf16":
        for parameter in parameters:
            # Its gradient is the float32 sum over micro-batches.
            parameter.grad_dtype = None  # type: ignore[attr-defined]
    return optimizer


def fuse(adam: torch.optim.Adam) -> None:
    """Uses one kernel for all tensors: otherwise a step holds the roots of all second moments at once. Megatron uses torch's
    Adam if neither Transformer Engine nor Apex is installed, and has no option for it."""
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False


def with_rounded_state(
    adam: torch.optim.Optimizer, config: OptimizerConfig, options: MegatronOptions
) -> StochasticRoundingAdamW:
    """Replaces Megatron's Adam, over the same parameter groups, which Megatron still references."""
    rounded = StochasticRoundingAdamW(
        # Megatron's parameters may be views, which torch's own check refuses.
        [torch.zeros(0)],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        exp_avg_dtype=STORED[options.exp_avg_dtype],
        exp_avg_sq_dtype=STORED[options.exp_avg_sq_dtype],
    )
    rounded.param_groups = adam.param_groups
    return rounded


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def optimizer_state(optimizer: MegatronOptimizer, weights: Mapping[str, Tensor]) -> Iterator[StateTensor]:
    """Main weights and moments of this rank. `weights`: the model's own, by name."""
    own = {id(weight): name for name, weight in weights.items()}
    names = own | {id(weight.main_param): name for name, weight in weights.items() if hasattr(weight, "main_param")}
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            name = names.get(id(parameter), "a shard of weights")
            if id(parameter) not in own:
                yield StateTensor(name=f"main weight {name}", tensor=parameter.detach())
            for key, value in part.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield StateTensor(name=f"{key} of {name}", tensor=value)


def make_schedule(optimizer: MegatronOptimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    warmup, decay = config.warmup_and_decay(total_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def set_step(schedule: OptimizerParamScheduler, steps_done: int) -> None:
    """Sets the learning rates of the optimizer step after `steps_done`."""
    schedule.num_steps = steps_done
    schedule.step(increment=0)
