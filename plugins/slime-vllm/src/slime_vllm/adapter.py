"""The LoRA adapter of a run's servers: their options for it, and the name that requests choose it by.

All versions have one name. With a name for each, requests that wait inside vLLM would keep the adapter that they began with. An
adapter that vLLM's route has loaded in place is read from the disk again at every step, so workers load later versions
themselves.
"""

from __future__ import annotations

from typing import Any, Final

from slime_core.contracts.setup import EngineSetup

NAME: Final = "slime-adapter"
"""Not a name that a model folder has, which vLLM would take for the model itself."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""
LOAD: Final = "/v1/load_lora_adapter"
ROUTES: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that gives the server this route."""


def options_of(setup: EngineSetup) -> dict[str, Any]:
    if not setup.adapter_rank:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= setup.adapter_rank),
    }


def environment_of(setup: EngineSetup) -> dict[str, str]:
    return {ROUTES: "1"} if setup.adapter_rank else {}
