"""What is hooked into the servers that slime starts, through SGLang's own hook registry.

Everywhere: three more actions of /weights_checker, checks before weights are loaded from a folder of slime's, no bias
that nobody trained in the head of a reward model, and draws that do not depend on what else is in a batch. On a CPU,
where they are missing: the three parts that sampling by seed needs, and memory for expert ids. A server that somebody
else started has none of this.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from slime_sglang.server.checksum import ACTION, checksum_of_weights
from slime_sglang.server.draws import DRAWS_BY_TOKEN, SAMPLER, SORTED, draw_by_token, draws_by_token
from slime_sglang.server.loading import CAN_VERIFY, forget_base, load_from_disk
from slime_sglang.server.murmur_hash import murmur_hash32
from slime_sglang.server.row_blocks import use_row_blocks

UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
LOADING: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "update_weights_from_disk": load_from_disk,
        "update_weights_from_tensor": forget_base,
        "update_weights_from_distributed": forget_base,
    }
)
"""Methods of it, and what is put around them."""
LOAD: Final = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
LOOKED_UP: Final = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Of Qwen3.5's layers."""
KEPT: Final[list[Any]] = []
"""Kernels end with the object that registered them."""


def register_hooks(*, on_cpu: bool) -> None:
    """Registered here, applied by SGLang's `load_plugins` in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", check_weights, HookType.AROUND)
    for name, hook in LOADING.items():
        HookRegistry.register(f"{UPDATER}.{name}", hook, HookType.AROUND)
    HookRegistry.register(LOAD, clear_bias, HookType.AROUND)
    HookRegistry.register(f"{SAMPLER}.{SORTED}", draw_by_token, HookType.AROUND)
    if on_cpu:
        HookRegistry.register(
            "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", use_cpu_kernels, HookType.AROUND
        )
        HookRegistry.register(
            "sglang.srt.mem_cache.pool_host.common._cuda_host_register", leave_unregistered, HookType.AROUND
        )
        allow_native_attention()
        if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
            HookRegistry.register(f"{SAMPLER}.murmur_hash32", hash_in_torch, HookType.AROUND)
        declare_kernels()


def is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether calls of `target` come by `hook`: it is looked for in the wrappers that are there, whoever else wraps it."""
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    while found is not None:
        if any(cell.cell_contents is hook for cell in getattr(found, "__closure__", None) or ()):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def check_weights(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    if action == CAN_VERIFY:
        # SGLang only logs a hook that it could not apply.
        missing = [name for name, hook in LOADING.items() if not is_hooked(f"{UPDATER}.{name}", hook)]
        if missing:
            raise NotImplementedError(f"{CAN_VERIFY}: this SGLang has no {UPDATER}.{missing[0]} to check folders in")
        return None
    if action == DRAWS_BY_TOKEN:
        if not draws_by_token():
            raise NotImplementedError(f"{DRAWS_BY_TOKEN}: this SGLang has no {SORTED} in {SAMPLER}")
        return None
    if action != ACTION:
        return original(checker, action, *args, **kwargs)
    parallelism = checker._parallelism_info()
    if parallelism.size != 1:
        raise NotImplementedError(f"{ACTION}: weights are spread over {parallelism.size} ranks, no rank has them whole")
    overall, by_name = checksum_of_weights(checker._get_model())
    return {
        "checksums": by_name,
        "per_gpu_checksum": overall,
        "parallelism_info": parallelism.model_dump(),
    }


def clear_bias(
    original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
) -> None:
    """The heads of SGLang's Qwen2 and Qwen3 classifiers have a bias. Models are published without one, and what their
    folder lacks would stay as it was drawn: another constant in the scores of every server."""
    names: set[str] = set()

    def seen() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            names.add(name)
            yield name, tensor

    original(model, seen(), *args, **kwargs)
    bias = getattr(getattr(model, "score", None), "bias", None)
    if isinstance(bias, torch.Tensor) and not any(name.endswith("score.bias") for name in names):
        with torch.no_grad():
            bias.zero_()


def use_cpu_kernels(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """SGLang's batch-invariant kernels are Triton's, which a CPU cannot run."""
    KEPT.append(use_row_blocks())


def leave_unregistered(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Memory of a host without a GPU has nothing to be registered with: expert ids are kept in such."""


def allow_native_attention() -> None:
    """Sampling by seed does not depend on the attention kernel, but SGLang asks for one that is batch-invariant."""
    from sglang.srt.server_args import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])


def hash_in_torch(original: Callable[..., Any], seed: Any, positions: Any, columns: Any) -> Any:
    """What samplers take for random numbers. SGLang's own is Triton's, or an op of `sgl_kernel`."""
    return murmur_hash32(seed, positions, columns)


def declare_kernels() -> None:
    """SGLang looks them up when it imports a model of another family, and with it the image processor of the Qwen-VL
    families. Declared and not defined: calling one fails."""
    for name in LOOKED_UP:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> ()")
