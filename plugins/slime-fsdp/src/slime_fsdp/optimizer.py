"""AdamW or plain SGD over the trained parameters, the learning-rate schedule, the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime_core.config.train import OptimizerConfig
from slime_core.errors import ConfigError


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Weight decay is decoupled and left off vectors (norms, biases)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("backend: the lists of frozen and trained parameters leave none to train.")
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, foreach=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def learning_rate(config: OptimizerConfig, steps_done: int, total_steps: int) -> float:
    """Of the optimiser step after `steps_done`: linear from 0 over the warm-up (so the very first is 0), then constant,
    or linear or cosine decay to min_lr at lr_decay_iters."""
    warmup = config.lr_warmup_iters
    if steps_done < warmup:
        return config.lr * steps_done / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    last = config.lr_decay_iters or total_steps
    ratio = min((steps_done - warmup) / max(last - warmup, 1), 1.0)
    left = 1.0 - ratio if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * ratio))
    return config.min_lr + (config.lr - config.min_lr) * left


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Global L2 norm, a scalar that is the same on every rank. A collective where gradients are sharded."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, 2.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """All tensors of AdamW's state under the names of their parameters, made now if no step has made them."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return {}
    tensors = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state[parameter]
            if not state:
                # As AdamW's own first step does for fused=True.
                state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"optimizer.{key}.{names[id(parameter)]}": value for key, value in state.items()}
    return tensors


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(device, non_blocking=device.type != "cpu")
