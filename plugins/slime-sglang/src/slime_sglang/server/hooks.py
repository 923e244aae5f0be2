"""What is put around functions of SGLang in the servers that slime starts, through SGLang's own hook registry. `hook_table`
has what for and when; a server that somebody else started has none of it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from slime_sglang.server.checksum import ACTION, checksum_of_weights, places_of_weights
from slime_sglang.server.draws import DRAWS_BY_TOKEN, SAMPLER, SORTED, draw_by_token, draws_by_token
from slime_sglang.server.hook_table import (
    BATCH_INVARIANT,
    CHECKER,
    CPU_SEEDS,
    FOLDERS,
    FROM_DISK,
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    HASH,
    HOOKS,
    LOAD,
    REGISTER_MEMORY,
    SORTED_DRAWS,
    ServerHook,
)
from slime_sglang.server.loading import CAN_VERIFY, forget_base, load_from_disk
from slime_sglang.server.murmur_hash import murmur_hash32
from slime_sglang.server.places import DIGESTS, PARTS, REFUSED
from slime_sglang.server.row_blocks import use_row_blocks

LOOKED_UP: Final = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Of Qwen3.5's layers."""
KEPT: Final[list[Any]] = []
"""Kernels end with the object that registered them."""


def register_hooks(names: Collection[str], *, on_cpu: bool) -> None:
    """Those of `hook_table` with these names; registered here, applied by SGLang's `load_plugins` in each of its
    processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks_called(names):
        for target in targets_of(hook):
            HookRegistry.register(target, AROUND[target], HookType.AROUND)
    if CPU_SEEDS.name in names:
        allow_native_attention()
    if on_cpu:
        declare_kernels()


def hooks_called(names: Collection[str]) -> list[ServerHook]:
    return [hook for hook in HOOKS if hook.name in names]


def targets_of(hook: ServerHook) -> list[str]:
    """Its targets here: where `sgl_kernel` has the hash, it stays."""
    has_hash = hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu")
    return [target for target in hook.targets if not (target == HASH and has_hash)]


def missing_targets(names: Collection[str]) -> list[tuple[ServerHook, str]]:
    """What SGLang could not hook in this process: it logs that, and goes on."""
    return [
        (hook, target)
        for hook in hooks_called(names)
        for target in targets_of(hook)
        if not is_hooked(target, AROUND[target])
    ]


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
        missing = [target for target in FOLDERS.targets if not is_hooked(target, AROUND[target])]
        if missing:
            raise NotImplementedError(f"{CAN_VERIFY}: folders are not checked here, {missing[0]} is not hooked")
        return None
    if action == DRAWS_BY_TOKEN:
        if not draws_by_token():
            raise NotImplementedError(f"{DRAWS_BY_TOKEN}: this SGLang has no {SORTED} in {SAMPLER}")
        return None
    if action not in (ACTION, PARTS, DIGESTS):
        return original(checker, action, *args, **kwargs)
    parallelism = checker._parallelism_info()
    if action == ACTION and parallelism.size != 1:
        raise NotImplementedError(f"{ACTION}: weights are spread over {parallelism.size} ranks, no rank has them whole")
    if action == ACTION:
        overall, found = checksum_of_weights(checker._get_model())
    elif parallelism.pp_size != 1:
        overall, found = (
            "",
            {REFUSED: f"weights are spread over {parallelism.pp_size} pipeline stages, of which one answers"},
        )
    else:
        overall, found = "", places_of_weights(checker._get_model(), action, ranks=parallelism.size)
    return {
        "checksums": found,
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


AROUND: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        CHECKER: check_weights,
        FROM_DISK: load_from_disk,
        FROM_TENSOR: forget_base,
        FROM_DISTRIBUTED: forget_base,
        LOAD: clear_bias,
        SORTED_DRAWS: draw_by_token,
        BATCH_INVARIANT: use_cpu_kernels,
        HASH: hash_in_torch,
        REGISTER_MEMORY: leave_unregistered,
    }
)
"""What is put around each target."""
