"""Rules for `model`, and for `backend`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from slime_compat import megatron_flags
from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import ACTOR, MEGATRON, MODEL, ROLLOUT

TRANSFORMER: Final = f"{MEGATRON}.override_transformer_config."
LAYOUT: Final = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Owner and name of a model on the Hugging Face Hub."""
REPLAY: Final = {"R2": "use_routing_replay", "R3": "use_rollout_routing_replay"}
ALL_LAYERS: Final = ("all-linear", "['all-linear']")


def model(translation: PeerTranslation) -> None:
    path = translation.text(f"{MODEL}.path")
    translation.put("model.hf_checkpoint", path)
    if HUB_NAME.fullmatch(path) and not Path(path).is_dir():
        translation.note(f"{MODEL}.path", f"{path}: must be a folder here: hf download {path} --local-dir {path}")
    if translation.switch(f"{MODEL}.trust_remote_code"):
        translation.put("model.trust_remote_code", True)
    mode = translation.text(f"{ACTOR}.router_replay.mode")
    replays = translation.switch(f"{ROLLOUT}.enable_rollout_routing_replay")
    if mode in REPLAY:
        translation.put(f"train.{REPLAY[mode]}", True)
    elif mode != "disabled":
        translation.note(f"{ACTOR}.router_replay.mode", f"{mode}: slime has R2 and R3", trains=True)
    elif replays:
        translation.put("train.use_rollout_routing_replay", True)


def backend(translation: PeerTranslation) -> None:
    translation.put("backend.name", translation.backend)
    translation.read.add(f"{ACTOR}.strategy")
    checkpoints = translation.switch(f"{MODEL}.enable_gradient_checkpointing")
    if translation.backend == "fsdp":
        translation.put("backend.gradient_checkpointing", checkpoints)
        fsdp(translation)
    elif translation.backend == "megatron":
        megatron(translation)


def fsdp(translation: PeerTranslation) -> None:
    sequence = translation.number(f"{ACTOR}.ulysses_sequence_parallel_size", int)
    if sequence > 1:
        translation.put("backend.context_parallel_size", sequence)
    if not translation.switch(f"{ACTOR}.fsdp_config.reshard_after_forward"):
        translation.put("backend.reshard_after_forward", False)
    if translation.switch(f"{ACTOR}.fsdp_config.offload_policy"):
        translation.put("backend.fsdp_cpu_offload", True)
    stored = translation.text(f"{ACTOR}.fsdp_config.model_dtype")
    if stored not in ("fp32", "float32"):
        translation.note(
            f"{ACTOR}.fsdp_config.model_dtype",
            f"{stored}: weights are kept in float32 here; backend.main_params_dtype = bf16 rounds them at random",
            trains=True,
        )
    rank = translation.number(f"{MODEL}.lora_rank", int)
    alpha, layers = translation.number(f"{MODEL}.lora_alpha", int), translation.value(f"{MODEL}.target_modules")
    adapter = translation.value(f"{MODEL}.lora_adapter_path")
    if adapter is not None:
        # Its adapter_config.json has rank, alpha and layers.
        translation.put("backend.lora_adapter_path", str(adapter))
    elif rank:
        translation.put("backend.lora_rank", rank)
        translation.put("backend.lora_alpha", alpha)
        if layers not in ALL_LAYERS:
            translation.put("backend.target_modules", layers if isinstance(layers, list) else [layers])


def megatron(translation: PeerTranslation) -> None:
    for name in LAYOUT:
        if translation.value(f"{MEGATRON}.{name}") is not None:
            translation.put(f"backend.{name}", translation.number(f"{MEGATRON}.{name}", int))
    translation.read |= {f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"}
    for key in [key for key in translation.given if key.startswith(TRANSFORMER)]:
        name = key.removeprefix(TRANSFORMER).replace("_", "-")
        if name in megatron_flags.OPTIONS:
            value: Any = translation.value(key)
            if value is not None:
                translation.put(f"backend.{name.replace('-', '_')}", value)
