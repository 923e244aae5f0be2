"""The memory of a server on each of its devices, as far as it is known before the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slime_core.algorithm.flops import ModelShape
from slime_core.contracts.setup import EngineSetup
from slime_core.data.model_folder import read_model_config
from slime_training.footprint import kv_bytes_per_token, num_parameters
from slime_training.memory_plan import EngineLoad, EngineMemory, MemoryItem, MemoryPhase
from slime_vllm.adapter import options_of
from slime_vllm.config import DRAFTS, parts_of, server_options
from slime_vllm.launching import KV_GIB_ON_CPU

UTILIZATION: Final = 0.92
"""vLLM's gpu_memory_utilization, unless the run sets it."""
NO_DEVICE: Final = "keys and values: they take a share of the device's memory; pass --device-memory 80GiB"
OF_DRAFTS: Final = "drafts: their weights, keys and values"
OF_EXPERTS: Final = "the adapter's matrices of experts"
BESIDE: Final = (
    "CUDA graphs and the workspace of kernels take a part of it: vLLM measures them at its start, and fewer tokens fit"
)
OTHER_LAYERS: Final = (
    "the number of tokens that fit is not estimated: layers store more than keys and values, or these are quantized"
)


def engine_memory(config: Any, load: EngineLoad) -> EngineMemory | None:
    """The memory of an engine; None for external servers and for quantized weights."""
    setup, chosen = load.setup, server_options(config)
    model_config = read_model_config(setup.model_path)
    if config.external_engine_addrs or chosen.get("quantization") or model_config.get("quantization_config"):
        return None
    on_gpu = setup.device == "cuda"
    element = 2 if on_gpu else 4
    # Devices that share one copy of the weights.
    ranks = max(setup.num_devices // (parts_of(config) // chosen.get("pipeline_parallel_size", 1)), 1)
    weights = element * num_parameters(setup.model_path, trust_remote_code=setup.trust_remote_code) // ranks
    adapter = adapter_bytes(config, model_config, setup, ranks=ranks) or 0
    given_back = setup.offload and on_gpu
    serving = {MemoryPhase.ROLLOUT} if given_back else {MemoryPhase.ROLLOUT, MemoryPhase.SYNC, MemoryPhase.ASLEEP}
    held = frozenset(serving | {MemoryPhase.SYNC})
    lines = [MemoryItem(component="weights", num_bytes=weights, moments=held, estimate=ranks > 1)]
    if adapter:
        lines.append(MemoryItem(component="adapter", num_bytes=adapter, moments=held))
    if given_back and (config.sleep_level == 1 or setup.transport in (None, "frozen")):
        asleep = frozenset({MemoryPhase.ASLEEP})
        lines += [
            MemoryItem(component=line.component, num_bytes=line.num_bytes, moments=asleep, place="host")
            for line in tuple(lines)
        ]
    missing = [OF_DRAFTS] if any(name in chosen for name in DRAFTS) else []
    if options_of(config, setup) and not adapter:
        missing.append(OF_EXPERTS)
    share = chosen.get("gpu_memory_utilization", UTILIZATION)
    if not on_gpu:
        left, why = KV_GIB_ON_CPU * 2**30, ""
    elif (given := chosen.get("kv_cache_memory_bytes")) is not None:
        left, why = int(given), ""
    elif load.device_bytes is None:
        return EngineMemory(lines=tuple(lines), not_estimated=(NO_DEVICE, *missing))
    else:
        left = max(int(share * load.device_bytes) - weights - adapter, 0)
        why = f"what gpu_memory_utilization = {share:g} leaves"
    if left:
        lines.append(MemoryItem(component="keys and values", num_bytes=left, moments=frozenset(serving), note=why))
    notes = [BESIDE] if why else []
    token = token_bytes(config, model_config, element, ranks)
    if token is None:
        return EngineMemory(lines=tuple(lines), notes=(OTHER_LAYERS, *notes), not_estimated=tuple(missing))
    copies = setup.num_devices // ranks
    return EngineMemory(
        lines=tuple(lines), kv_tokens=left // token * copies, notes=tuple(notes), not_estimated=tuple(missing)
    )


def token_bytes(config: Any, model_config: Mapping[str, Any], element: int, ranks: int) -> int | None:
    """Keys and values of a token on one rank; None: not known."""
    whole = kv_bytes_per_token(model_config, element)
    if whole is None or getattr(config, "kv_cache_dtype", None) not in (None, "auto"):
        return None
    stages = server_options(config).get("pipeline_parallel_size", 1)
    heads = ModelShape.from_config(model_config.get("text_config", model_config)).num_kv_heads
    # With fewer key-value heads than ranks some ranks hold the same ones.
    return int(whole // (min(ranks // stages, heads) * stages))


def adapter_bytes(config: Any, model_config: Mapping[str, Any], setup: EngineSetup, *, ranks: int) -> int | None:
    """The matrices of adapters on one rank; 0: none; None: not known. For each place vLLM allocates both matrices of every
    linear layer of the language model, of the embedding and of the head, whichever an adapter has. Of a sharded layer one of
    them is whole on every rank (lora/layers)."""
    options = options_of(config, setup)
    if not options:
        return 0
    text = model_config.get("text_config", model_config)
    if any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    stages = server_options(config).get("pipeline_parallel_size", 1)
    sizes, tp = ModelShape.from_config(text), max(ranks // stages, 1)
    rank, element = int(options["max_lora_rank"]), 2 if setup.device == "cuda" else 4
    queries = sizes.num_heads * sizes.head_dim // tp
    keys = max(sizes.num_kv_heads // tp, 1) * sizes.head_dim
    ffn, hidden = sizes.ffn // tp, sizes.hidden
    # Three inputs and outputs of queries, keys and values, two of gate and up; and the two layers behind them.
    layer = 3 * hidden + queries + 2 * keys + queries + hidden + 2 * (hidden + ffn) + ffn + hidden
    ends = 2 * (sizes.vocab + hidden)
    return int(options["max_loras"]) * element * rank * (layer * (sizes.num_layers // stages) + ends)
