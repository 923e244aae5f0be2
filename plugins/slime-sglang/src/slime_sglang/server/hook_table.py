"""The hooks of slime in SGLang: their targets, purposes and servers. Does not import SGLang."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHECKER: Final = "sglang.srt.utils.weight_checker.WeightChecker.handle"
UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
FROM_DISK: Final = f"{UPDATER}.update_weights_from_disk"
FROM_TENSOR: Final = f"{UPDATER}.update_weights_from_tensor"
FROM_DISTRIBUTED: Final = f"{UPDATER}.update_weights_from_distributed"
LOAD: Final = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
SORTED_DRAWS: Final = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
HASH: Final = "sglang.srt.layers.sampler.murmur_hash32"
BATCH_INVARIANT: Final = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
UNPINNED_EXPERTS: Final = "sglang.srt.state_capturer.base.ALLOC_MEMORY_FUNCS"
"""If SGLang lacks it, memory for expert ids is pinned, which requires a GPU."""
REGISTER_MEMORY: Final = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
LORA_MANAGER: Final = "sglang.srt.lora.lora_manager.LoRAManager.__init__"

GATE: Final = "gate="
"""Beginning of a server's argument with a file: its processes wait for it before they use devices."""
RENDEZVOUS: Final = "sglang.srt.distributed.parallel_state.init_distributed_environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHook:
    name: str
    """The name that is passed to a server to enable the hook."""
    targets: tuple[str, ...]
    """Functions of SGLang that it wraps."""
    purpose: str
    when: str
    essential: bool = False
    """Without it a server would return wrong results without an error."""


CHECKS: Final = ServerHook(
    name="checks",
    targets=(CHECKER,),
    purpose="checksums of the served weights under Hugging Face names; reports which of these hooks are in place",
    when="engines that generate or score",
)
FOLDERS: Final = ServerHook(
    name="folders",
    targets=(FROM_DISK, FROM_TENSOR, FROM_DISTRIBUTED),
    purpose="checks each bucket before anything is loaded, and applies deltas",
    when="transports disk and delta",
)
HEADS: Final = ServerHook(
    name="heads",
    targets=(LOAD,),
    purpose="no head with weights of its own that no file has: a classifier's bias, a head that should be the embedding",
    when="always",
    essential=True,
)
DRAWS: Final = ServerHook(
    name="draws",
    targets=(SORTED_DRAWS,),
    purpose="draws by seed that do not depend on what else is in a batch",
    when="deterministic",
)
CPU_SEEDS: Final = ServerHook(
    name="cpu-seeds",
    targets=(BATCH_INVARIANT, HASH),
    purpose="sampling by seed without Triton and sgl_kernel",
    when="deterministic, on a CPU",
)
CPU_EXPERTS: Final = ServerHook(
    name="cpu-experts",
    targets=(REGISTER_MEMORY,),
    purpose="memory for expert ids that is not registered with CUDA",
    when="use_rollout_routing_replay, on a CPU",
)
CPU_ADAPTERS: Final = ServerHook(
    name="cpu-adapters",
    targets=(LORA_MANAGER,),
    purpose="memory for adapters that is not pinned",
    when="max_adapters, on a CPU",
)
ONE_ADDRESS: Final = ServerHook(
    name="one-address",
    targets=(RENDEZVOUS,),
    purpose="processes of a server meet at one address, not on every interface of the machine",
    when="always",
)
HOOKS: Final = (ONE_ADDRESS, CHECKS, FOLDERS, HEADS, DRAWS, CPU_SEEDS, CPU_EXPERTS, CPU_ADAPTERS)


def in_source(target: str, folder: Path | None = None) -> bool:
    """Whether the source of SGLang contains `target`; nothing is imported. `folder`: its package; None: the installed one."""
    package, *parts = target.split(".")
    if folder is None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return False
        folder = Path(next(iter(spec.submodule_search_locations)))
    path = folder
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    else:
        path /= "__init__.py"
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_bytes()).body
    for part in parts:
        named = next((node for node in body if part in names_of(node)), None)
        if named is None:
            return False
        body = getattr(named, "body", [])
    return True


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
