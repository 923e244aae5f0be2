"""Megatron-core without CUDA: the object that its modules use as `torch` on a CPU.

Megatron asks for the current CUDA device, for streams and for tensors on "cuda" in places that have nothing to do with
kernels. On a CPU the name `torch` inside its own modules is bound to a substitute that returns the CPU for those calls
and forwards all others. torch itself, and other code that uses it, is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "as_tensor", "zeros_like", "empty_like", "ones_like")
CPU = torch.device("cpu")


class NoEvent:
    """An event or a stream on a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> NoEvent:
        return self

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...


class CpuRandom:
    """`torch.cuda.random` for Megatron, which saves its states around recomputation."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()


class CpuAsCuda:
    """`torch.cuda` for Megatron."""

    random = CpuRandom()

    Stream = NoEvent
    Event = NoEvent

    def current_device(self) -> torch.device:
        return CPU

    def current_stream(self, *args: Any) -> NoEvent:
        return NoEvent()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self, *args: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class GlooCollectives:
    """`torch.distributed` for Megatron: gloo accepts split sizes as integers, not as numpy's, and gathers and scatters parts of
    equal size only, while with expert tensor parallelism each rank has as many tokens as were routed to it."""

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **more: Any
    ) -> Any:
        given = (output_split_sizes, input_split_sizes)
        sizes = (None if of is None else [int(size) for size in of] for of in given)
        return torch.distributed.all_to_all_single(output, input, *sizes, **more)

    def all_gather(self, outputs: list[torch.Tensor], input: torch.Tensor, **more: Any) -> Any:
        longest = max(len(output) for output in outputs)
        if all(len(output) == longest for output in outputs):
            return torch.distributed.all_gather(outputs, input, **more)
        padded = [output.new_empty((longest, *output.shape[1:])) for output in outputs]
        own = torch.cat([input, input.new_zeros((longest - len(input), *input.shape[1:]))])
        torch.distributed.all_gather(padded, own, **more)
        for output, part in zip(outputs, padded, strict=True):
            output.copy_(part[: len(output)])
        return None

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None, **more: Any) -> Any:
        if len({len(part) for part in inputs}) == 1:
            return torch.distributed.reduce_scatter(output, inputs, group=group, **more)
        total = torch.cat(inputs)
        torch.distributed.all_reduce(total, group=group)
        output.copy_(total.split([len(part) for part in inputs])[torch.distributed.get_rank(group)])
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)


class CpuTorch:
    """`torch` for Megatron."""

    cuda = CpuAsCuda()
    distributed = GlooCollectives()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return on_cpu(value) if name in FACTORIES else value


def on_cpu(factory: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return made


class OneGenerator:
    """Megatron's tracker of random states for dropout, which is off here: forking it changes nothing."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None: ...

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def use_cpu() -> None:
    """Applies to every module of Megatron that is imported; call it again after more imports."""
    stand_in = CpuTorch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER = OneGenerator()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


@contextmanager
def float_types_of_cuda(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Megatron's mixed-precision and distributed optimizers distinguish dtypes by the name of the CUDA tensor type."""
    names = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
    patched = list(parameters)
    for parameter in patched:
        text = f"torch.cuda.{names[parameter.dtype]}Tensor"
        parameter.type = lambda text=text: text  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        for parameter in patched:
            del parameter.type
