"""Sleep: what Megatron keeps on the GPU goes to the host, and comes back; both in two parts, weights and the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from slime_megatron.offload import move_main_weights
from slime_megatron.optimizer import parts_of


def to_host(chunks: Sequence[Any], optimizer: MegatronOptimizer, *, weights: bool = True) -> None:
    """Gradients' memory and optimiser, if they are not there already; and the weights."""
    buffers = buffers_of(chunks)
    if not buffers or any(buffer.grad_data.untyped_storage().size() for buffer in buffers):
        optimizer.zero_grad()
        for part in parts_of(optimizer):
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                move_main_weights(part.optimizer, torch.device("cpu"))
            elif isinstance(part, FP32Optimizer):
                move_state(part.optimizer, torch.device("cpu"))
            else:
                part.offload_to_cpu()
    for buffer in buffers:
        if size := buffer.grad_data.untyped_storage().size():
            buffer.grad_bytes = size
            buffer.grad_data.untyped_storage().resize_(0)
        if weights and buffer.param_data is not None:
            buffer.param_host = buffer.param_data.to("cpu")
            buffer.param_data.untyped_storage().resize_(0)
    for chunk in chunks if weights else ():
        for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]:
            if tensor.is_cuda and tensor.untyped_storage().size():
                tensor.data = tensor.data.cpu()
    torch.cuda.empty_cache()


def to_device(chunks: Sequence[Any], optimizer: MegatronOptimizer, *, others: bool = True) -> None:
    """What is not there yet: the weights; and gradients' memory and optimiser."""
    for buffer in buffers_of(chunks):
        if others:
            buffer.grad_data.untyped_storage().resize_(buffer.grad_bytes)
            buffer.grad_data.zero_()
        if buffer.param_data is not None and getattr(buffer, "param_host", None) is not None:
            size = buffer.param_host.numel() * buffer.param_host.element_size()
            buffer.param_data.untyped_storage().resize_(size)
            buffer.param_data.copy_(buffer.param_host)
            buffer.param_host = None
    device = torch.cuda.current_device()
    for chunk in chunks:
        for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]:
            if not tensor.is_cuda:
                tensor.data = tensor.data.to(device)
    for part in parts_of(optimizer) if others else ():
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            move_main_weights(part.optimizer, torch.device("cuda", device))
        elif isinstance(part, FP32Optimizer):
            move_state(part.optimizer, torch.device("cuda", device))
        else:
            part.restore_from_cpu()


def move_state(optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Of an optimiser that steps on the model's own weights, which Megatron would take along. Counts stay where they are."""
    for state in [] if optimizer is None else optimizer.state.values():
        for name, value in state.items():
            if value.dim():
                state[name] = value.to(device)


def buffers_of(chunks: Sequence[Any]) -> list[Any]:
    return [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
