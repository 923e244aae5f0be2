"""What the embedded engine and its buckets hold."""

from __future__ import annotations

from slime_core.data.model_folder import read_model_config
from slime_local.config import DirectConfig, LocalConfig
from slime_training.footprint import kv_bytes_per_token, num_parameters
from slime_training.memory_plan import EngineLoad, EngineMemory, MemoryItem, MemoryPhase, TransportMemory

SERVING = frozenset({MemoryPhase.ROLLOUT})
NO_LIMIT = "keys and values: this model's layers hold something else beside them"


def engine_memory(config: LocalConfig, load: EngineLoad) -> EngineMemory:
    setup = load.setup
    on_gpu = setup.device == "cuda"
    wide = config.dtype == "float32" or (config.dtype == "auto" and not on_gpu)
    element = 4 if wide else 2
    size = element * num_parameters(setup.model_path, trust_remote_code=setup.trust_remote_code)
    given_back = setup.offload and on_gpu
    awake = frozenset({MemoryPhase.ROLLOUT, MemoryPhase.SYNC} | (set() if given_back else {MemoryPhase.ASLEEP}))
    lines = [MemoryItem(component="weights", num_bytes=size, moments=awake)]
    if given_back:
        moments = frozenset({MemoryPhase.ASLEEP})
        lines.append(MemoryItem(component="weights", num_bytes=size, moments=moments, place="host"))
    token = kv_bytes_per_token(read_model_config(setup.model_path), element)
    if token is None:
        return EngineMemory(lines=tuple(lines), not_estimated=(NO_LIMIT,))
    asked = min(config.max_running, setup.max_batch) * setup.max_context_len * token
    allowed = max(config.kv_cache_bytes, setup.max_context_len * token)
    lines.append(
        MemoryItem(
            component="keys and values",
            num_bytes=2 * min(asked, allowed),
            moments=SERVING if given_back else awake,
            note="with room to grow",
        )
    )
    return EngineMemory(lines=tuple(lines), kv_tokens=min(asked, allowed) // token)


def bucket_memory(config: DirectConfig, num_bytes: int) -> TransportMemory:
    size, sync = min(config.update_weight_buffer_size, num_bytes), frozenset({MemoryPhase.SYNC})
    return TransportMemory(
        trainer=(
            MemoryItem(component="a bucket", num_bytes=size, moments=sync),
            MemoryItem(component="two buckets", num_bytes=min(2 * size, num_bytes), moments=sync, place="host"),
        )
    )
