"""What requests set of a model: its form, what clients note of it, and Adam's settings of a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tinker.types import AdamParams, CreateModelRequest, OptimStepRequest

from slime_tinker.errors import RequestError
from slime_tinker.models import AdamSettings, ModelSpec


def spec_of(asked: CreateModelRequest, *, whole: bool) -> ModelSpec:
    """RequestError for what this server does not train."""
    if asked.optimizer_config.type != "adamw":
        raise RequestError(
            f'optimizer_config "{asked.optimizer_config.type}": not served here; this server has "adamw".'
        )
    if whole:
        return ModelSpec(rank=None)
    lora = asked.lora_config
    if lora is None:
        raise RequestError(
            "lora_config: missing. This server trains LoRA adapters: create_lora_training_client makes one."
        )
    if lora.rank < 1:
        raise RequestError(f"lora_config.rank = {lora.rank}: must be 1 or above.")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise RequestError(
            "lora_config: train_attn, train_mlp and train_unembed are all false, so nothing would be trained."
        )
    return ModelSpec(
        rank=lora.rank,
        seed=lora.seed or 0,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
        unembedding=lora.train_unembed,
    )


def adam_of(asked: OptimStepRequest) -> AdamSettings:
    given = asked.optim_params
    if not isinstance(given, AdamParams):
        raise RequestError(f'optim_params of type "{given.type}": this model has adamw.')
    numbers = {
        "learning_rate": (given.learning_rate, 0.0, math.inf),
        "beta1": (given.beta1, 0.0, 1.0),
        "beta2": (given.beta2, 0.0, 1.0),
        "eps": (given.eps, 0.0, math.inf),
        "weight_decay": (given.weight_decay, 0.0, math.inf),
        "grad_clip_norm": (given.grad_clip_norm, 0.0, math.inf),
    }
    for name, (value, low, high) in numbers.items():
        if not low <= value < high:
            raise RequestError(f"adam_params.{name} = {value:g}: must be in [{low:g}, {high:g}).")
    return AdamSettings(
        lr=given.learning_rate,
        betas=(given.beta1, given.beta2),
        eps=given.eps,
        weight_decay=given.weight_decay,
        grad_clip=given.grad_clip_norm,
    )


def require_small(metadata: Mapping[str, Any] | None, most: int) -> None:
    """RequestError: it is kept for as long as the folder."""
    size = len(json.dumps(metadata))
    if size > most:
        raise RequestError(f"user_metadata: {size} bytes as JSON, and there may be {most}.")
