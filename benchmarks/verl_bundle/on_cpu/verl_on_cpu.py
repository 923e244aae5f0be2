"""verl's trainer and its SGLang server on a CPU, to find errors before a GPU is needed.

    export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_ENGINE_DEVICE=cuda
    export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 RAY_raylet_start_wait_time_s=300; unset PYTHONDONTWRITEBYTECODE
    PYTHONPATH=plugins/slime-sglang/src python benchmarks/peer_gpu.py --sides verl --device cpu --shape tiny --cores 8 \\
        --peer-path benchmarks/verl_bundle/on_cpu --peer-python .venv-verl/bin/python --timeout 2300 \\
        --requests 16 --concurrency 16 --new-tokens 8 --prompt-tokens 8 --train-tokens 256 --steps 2 \\
        --verl-workers 1 --verl-log-probs torch --engine '{"attention_backend": "torch_native", "device": "cpu",
            "mem_fraction_static": 0.3, "max_total_tokens": 20000, "enable_memory_saver": false}' \\
        --verl trainer.device=cpu --verl +ray_kwargs.ray_init.num_gpus=1 --verl +ray_kwargs.ray_init.include_dashboard=False \\
        --verl transfer_queue.backend.SimpleStorage.num_data_storage_units=1

.venv-verl has torch for CPUs, verl_bundle/requirements.txt, SGLang 0.5.16 and what it imports (Makefile), Ray and transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.multiprocessing import reductions
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class CpuModule(ModuleType):
    """What verl asks of torch.cuda: numbers are 0, calls do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("max_memory", "memory_")):
            return lambda *args, **kwargs: 0
        known = {"mem_get_info": (2**34, 2**34), "current_device": "cpu", "is_available": True, "device_count": 1}
        return lambda *args, **kwargs: known.get(name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def nothing(self, *args: Any, **kwargs: Any) -> Any:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = get_collective_module = cudart = nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}


original = torch.distributed.init_process_group


@functools.wraps(original)
def init_process_group(backend: str | None = None, **kwargs: Any) -> Any:
    """verl asks for cpu:gloo beside the device's own backend, which is the same one here."""
    return original(backend="gloo" if backend and "gloo" in backend else backend, **kwargs)


torch.distributed.init_process_group = init_process_group
torch.multiprocessing.set_sharing_strategy("file_system")
# SGLang's change of how tensors are sent is for devices; where this is set, it does nothing.
reductions._reduce_tensor_original = reductions.reduce_tensor  # type: ignore[attr-defined]
