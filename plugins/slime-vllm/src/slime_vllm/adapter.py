"""LoRA adapters of a run's servers: their options and routes for them.

With the transport `adapter` there is one, and all its versions have one name. With a name for each, requests that wait inside
vLLM would keep the adapter that they began with. An adapter that vLLM's route has loaded in place is read from the disk again
at every step, so workers load later versions themselves.
"""

from __future__ import annotations

from typing import Any, Final

from slime_core.contracts.setup import EngineSetup
from slime_serving.adapter_options import AdapterOptions

NAME: Final = "slime-adapter"
"""Not a name that a model folder has, which vLLM would take for the model itself."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""
LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
ROUTES: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that gives the server these routes."""
FIRST_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that chooses vLLM's model runner: `slime_vllm_server.prompt_heads` knows the first one."""


def options_of(config: AdapterOptions, setup: EngineSetup) -> dict[str, Any]:
    if config.most_adapters:
        return {
            "enable_lora": True,
            "max_loras": config.adapter_places,
            "max_cpu_loras": config.most_adapters,
            "max_lora_rank": rank_option(config.adapter_rank),
            # As many as a prompt's log-probs are asked for (`AdapterEngine.prompt_log_probs`): all.
            "max_logprobs": -1,
        }
    if setup.adapter_rank:
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank_option(setup.adapter_rank)}
    return {}


def rank_option(rank: int) -> int:
    """vLLM's max_lora_rank for adapters up to this rank."""
    return next(option for option in RANKS if option >= rank)


def environment_of(config: AdapterOptions, setup: EngineSetup) -> dict[str, str]:
    if config.most_adapters:
        return {ROUTES: "1", FIRST_RUNNER: "0"}
    return {ROUTES: "1"} if setup.adapter_rank else {}
