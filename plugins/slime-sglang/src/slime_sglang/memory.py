"""The memory of a server on each of its devices, as far as it is known before the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from slime_core.contracts.setup import EngineSetup
from slime_core.data.model_folder import read_model_config
from slime_sglang.launching import drops_weights, tokens_in_flight
from slime_training.footprint import kv_bytes_per_token, num_parameters
from slime_training.memory_plan import EngineLoad, EngineMemory, MemoryItem, MemoryPhase

NO_FRACTION: Final = (
    "keys and values: SGLang chooses mem_fraction_static when it starts; pass --sglang-mem-fraction-static"
)
NO_DEVICE: Final = "keys and values: they take a share of the device's memory; pass --device-memory 80GiB"
BESIDE: Final = "CUDA graphs and the workspace of kernels come on top, in what mem_fraction_static leaves of the device"
OTHER_LAYERS: Final = (
    "the number of tokens that fit is not estimated: layers store more than keys and values, or these are quantized"
)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one rank of a server."""

    weights: int
    kv_token: int | None
    """Bytes of a token's keys and values; None: not known."""


def engine_memory(config: Any, load: EngineLoad) -> EngineMemory | None:
    """The memory of an engine; None for external servers and for quantized weights."""
    setup = load.setup
    quantized = getattr(config, "quantization", None) or read_model_config(setup.model_path).get("quantization_config")
    if config.external_engine_addrs or quantized:
        return None
    share = share_of(config, setup)
    given_back = setup.offload and setup.device == "cuda"
    serving = {MemoryPhase.ROLLOUT} if given_back else {MemoryPhase.ROLLOUT, MemoryPhase.SYNC, MemoryPhase.ASLEEP}
    held = frozenset(serving | {MemoryPhase.SYNC})
    split = setup.num_devices > config.servers
    lines = [MemoryItem(component="weights", num_bytes=share.weights, moments=held, estimate=split)]
    if given_back and not drops_weights(config, setup):
        asleep = frozenset({MemoryPhase.ASLEEP})
        lines.append(MemoryItem(component="weights", num_bytes=share.weights, moments=asleep, place="host"))
    fraction = getattr(config, "mem_fraction_static", None)
    notes = [BESIDE] if setup.device == "cuda" else []
    if setup.device == "cpu":
        tokens = tokens_in_flight(setup)
        left, why = (share.kv_token or 0) * tokens, ""
    elif fraction is None or load.device_bytes is None:
        return EngineMemory(
            lines=tuple(lines), not_estimated=(NO_FRACTION if fraction is None else NO_DEVICE,), notes=tuple(notes)
        )
    else:
        left = max(int(fraction * load.device_bytes) - share.weights, 0)
        tokens, why = left // (share.kv_token or 1), f"what mem_fraction_static = {fraction:g} leaves"
    if left:
        lines.append(MemoryItem(component="keys and values", num_bytes=left, moments=frozenset(serving), note=why))
    if share.kv_token is None:
        return EngineMemory(lines=tuple(lines), notes=(OTHER_LAYERS, *notes))
    return EngineMemory(lines=tuple(lines), kv_tokens=tokens * config.servers, notes=tuple(notes))


def share_of(config: Any, setup: EngineSetup) -> Share:
    """The share of one rank: matrices are sharded over the ranks; norms, which every rank has, are too small to count."""
    element = 2 if setup.device == "cuda" else 4
    ranks = max(setup.num_devices // config.servers, 1)
    stages = getattr(config, "pp_size", None) or 1
    weights = element * num_parameters(setup.model_path, trust_remote_code=setup.trust_remote_code) // ranks
    model_config = read_model_config(setup.model_path)
    token = kv_bytes_per_token(model_config, element)
    if token is None or getattr(config, "kv_cache_dtype", None) not in (None, "auto"):
        return Share(weights=weights, kv_token=None)
    sizes = model_config.get("text_config", model_config)
    heads = sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
    # With fewer key-value heads than ranks some ranks hold the same ones.
    return Share(weights=weights, kv_token=token // (min(ranks // stages, heads) * stages))
