"""Rules for `launcher`, `engine` and `backend`, and for sampling."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.trl.translation import TrlTranslation

OFF: Final[dict[str, tuple[Any, ...]]] = {"min_p": (None, 0, 0.0), "repetition_penalty": (1, 1.0)}
"""Keywords of sampling that rollouts do not have here, with the values that switch them off."""


def launcher(translation: TrlTranslation) -> None:
    processes, size = translation.num_processes, translation.number("vllm_tensor_parallel_size", int)
    memory, mode = translation.number("vllm_gpu_memory_utilization", float), translation.text("vllm_mode")
    served = translation.switch("use_vllm") and mode == "server"
    translation.put("launcher.name", "ray" if processes > 1 or served else "local")
    translation.put("launcher.actor_num_gpus_per_node", processes)
    translation.put("launcher.colocate", not served)
    translation.put("launcher.rollout_num_gpus", size if served else max(processes, size))
    translation.put("launcher.rollout_num_gpus_per_engine", size)
    translation.put("engine.name", translation.engine)
    if translation.switch("use_vllm") and not served:
        translation.put_memory_share(memory)
    if served:
        translation.note(
            "vllm_mode", f"server: the run starts engines of its own, on {size} GPUs; set launcher.rollout_num_gpus"
        )


def backend(translation: TrlTranslation) -> None:
    translation.put("backend.name", translation.backend)
    checkpoints, bf16 = translation.switch("gradient_checkpointing"), translation.value("bf16")
    if translation.switch("fp16"):
        translation.note("fp16", "bfloat16 is used on GPUs; for float32 set backend.precision", trains=True)
    if translation.backend != "fsdp":
        return
    translation.put("backend.gradient_checkpointing", checkpoints)
    if bf16 is False:
        translation.put("backend.precision", "float32")
    peft = translation.script.peft
    if "peft_config" not in translation.script.trainer and not translation.given.get("use_peft"):
        return
    names = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}
    for name, key in names.items():
        # peft's own defaults are rank 8 and alpha 8.
        value = peft.get(name, 8 if name != "target_modules" else None)
        if value is not None and value != "all-linear":
            translation.put(f"backend.{key}", [value] if key == "target_modules" and isinstance(value, str) else value)
    if peft.get("lora_dropout"):
        translation.note("LoraConfig.lora_dropout", f"{peft['lora_dropout']}: there is no dropout here", trains=True)


def sampling(translation: TrlTranslation) -> None:
    translation.put("rollout.rollout_temperature", translation.number("temperature", float))
    translation.put("rollout.rollout_top_p", translation.number("top_p", float))
    # 0 and None are off in TRL.
    top_k = translation.value("top_k")
    translation.put("rollout.rollout_top_k", int(top_k) if top_k else -1)
    for keyword, off in OFF.items():
        value = translation.value(keyword)
        if value not in off:
            translation.note(keyword, f"{value}: rollouts are sampled without it here", trains=True)
