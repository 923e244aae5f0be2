"""Wraps functions of SGLang in the servers that slime starts, through SGLang's own hook registry. `hook_table` has the
purpose of each hook; external servers have none of them.
"""

from __future__ import annotations

import pkgutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from slime_sglang.server.checksum import ACTION, checksum_of_weights, places_of_weights
from slime_sglang.server.hook_table import (
    BATCH_INVARIANT,
    CHECKER,
    CPU_SEEDS,
    FOLDERS,
    FROM_DISK,
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    GATE,
    HASH,
    HOOKS,
    LOAD,
    LORA_MANAGER,
    REGISTER_MEMORY,
    RENDEZVOUS,
    SORTED_DRAWS,
    ServerHook,
)
from slime_sglang.server.loading import CAN_VERIFY, forget_base, load_from_disk
from slime_sglang.server.murmur_hash import murmur_hash32
from slime_sglang.server.row_blocks import use_row_blocks
from slime_sglang.server.seeded_sampling import DRAWS_BY_TOKEN, SAMPLER, SORTED, draw_by_token, draws_by_token
from slime_sglang.server.shard_actions import DIGESTS, PARTS, REFUSED
from slime_sglang.server.unpinned import without_pinning
from slime_training.rendezvous import on_one_address

LOOKED_UP: Final = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Kernels of Qwen3.5's layers."""
LOOK_S: Final = 0.05
KEPT: Final[list[Any]] = []
"""Kernels live as long as the object that registered them."""


def register_hooks(names: Collection[str], *, on_cpu: bool) -> None:
    """Registers the hooks of `hook_table` with these names. SGLang's `load_plugins` applies them in each of its processes."""
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
    """Targets of `hook` on this machine: the hash is not replaced if `sgl_kernel` has it."""
    has_hash = hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu")
    return [target for target in hook.targets if not (target == HASH and has_hash)]


def missing_targets(names: Collection[str]) -> list[tuple[ServerHook, str]]:
    """Hooks that SGLang could not apply in this process: it only logs that."""
    return [
        (hook, target)
        for hook in hooks_called(names)
        for target in targets_of(hook)
        if not is_hooked(target, AROUND[target])
    ]


def is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether `target` is wrapped by `hook`. Searches all its wrappers, including those of others."""
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
            {REFUSED: f"weights are spread over {parallelism.pp_size} pipeline stages, and only one of them responds"},
        )
    else:
        overall, found = "", places_of_weights(checker._get_model(), action, ranks=parallelism.size)
    return {
        "checksums": found,
        "per_gpu_checksum": overall,
        "parallelism_info": parallelism.model_dump(),
    }


def load_heads(
    original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
) -> None:
    """Sets the bias of a classifier's head to 0 if the files have none. SGLang's Qwen2 and Qwen3 classifiers have a bias that
    released models lack: it would keep its random initial value, another constant in the scores of every server.

    Raises RuntimeError, which ends the server, if a model that has no head beside its embedding gets one here, as SGLang's
    mixtures of experts do: it would sample from whatever its memory held. A head in the files of such a model is left out,
    since trainers send none."""
    names: set[str] = set()
    ties = ties_head(getattr(model, "config", None))

    def seen() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            names.add(name)
            if not (ties and name.endswith("lm_head.weight")):
                yield name, tensor

    original(model, seen(), *args, **kwargs)
    bias = getattr(getattr(model, "score", None), "bias", None)
    if isinstance(bias, torch.Tensor) and not any(name.endswith("score.bias") for name in names):
        with torch.no_grad():
            bias.zero_()
    if ties and has_own_head(model):
        raise RuntimeError(
            f"{type(model).__name__} of this SGLang has a head of its own, but the model's is its embedding "
            "(tie_word_embeddings = true), so this head would never be loaded. Save the model with tie_word_embeddings = false "
            "and its own lm_head.weight, or use another engine."
        )


def ties_head(config: Any) -> bool:
    inner = getattr(config, "text_config", None)
    return bool(getattr(inner, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))


def has_own_head(model: torch.nn.Module) -> bool:
    """Whether the head differs from the embedding. One that is packed for AMX was copied from it."""
    parameters = dict(model.named_parameters())
    name, embedding_name = (
        next((name for name in parameters if name.endswith(end)), None)
        for end in ("lm_head.weight", "embed_tokens.weight")
    )
    if name is None or embedding_name is None:
        return False
    head, embedding = parameters[name].detach(), parameters[embedding_name].detach()
    packed = getattr(model.get_submodule(name.removesuffix(".weight")), "use_intel_amx_backend", False)
    if packed or head.shape != embedding.shape:
        return False
    # By their bytes: weights of a run that has diverged are no numbers, and equal.
    return not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8))


def use_cpu_kernels(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replaces SGLang's batch-invariant kernels, which are in Triton and do not run on a CPU."""
    KEPT.append(use_row_blocks())


def leave_unregistered(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Does nothing: without a GPU, the host memory of expert ids cannot be registered with CUDA."""


def meet_on_one_address(
    original: Callable[..., Any],
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    *args: Any,
    **kwargs: Any,
) -> None:
    """torch's own store listens on every interface, and requires no token. Before that, a server that was started early waits
    until trainers have left its devices: SGLang measures their free memory next."""
    for gate in (Path(word.removeprefix(GATE)) for word in sys.argv[1:] if word.startswith(GATE)):
        while not gate.exists():
            time.sleep(LOOK_S)
    original(world_size, rank, on_one_address(distributed_init_method), *args, **kwargs)


def allow_native_attention() -> None:
    """Allows the attention backend torch_native. Sampling by seed does not depend on it, but SGLang requires a
    batch-invariant one."""
    from sglang.srt.server_args import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])


def hash_in_torch(original: Callable[..., Any], seed: Any, positions: Any, columns: Any) -> Any:
    """The samplers' random numbers. SGLang's own function is in Triton, or an op of `sgl_kernel`."""
    return murmur_hash32(seed, positions, columns)


def declare_kernels() -> None:
    """Declares ops that SGLang looks up when it imports other model families, including the image processor of Qwen-VL. They
    are declared without an implementation: calling one fails."""
    for name in LOOKED_UP:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> ()")


AROUND: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        CHECKER: check_weights,
        FROM_DISK: load_from_disk,
        FROM_TENSOR: forget_base,
        FROM_DISTRIBUTED: forget_base,
        LOAD: load_heads,
        SORTED_DRAWS: draw_by_token,
        BATCH_INVARIANT: use_cpu_kernels,
        HASH: hash_in_torch,
        REGISTER_MEMORY: leave_unregistered,
        LORA_MANAGER: without_pinning,
        RENDEZVOUS: meet_on_one_address,
    }
)
"""The wrapper of each target."""
