"""Layouts: how many ranks share what, and whether a model and a number of ranks can be divided so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slime_megatron.stages import Stages, divisors, nearest, stage_problems

EXPERT_COUNTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
"""What config.json calls the number of experts; transformers 5 writes the last for Qwen3-MoE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    stages: Stages = field(default_factory=Stages)


def ranks_of(shape: Shape) -> int:
    """The fewest ranks that such a layout can be laid out on."""
    dense = shape.tp * shape.pp * shape.cp
    return math.lcm(dense, shape.etp * shape.ep * shape.pp)


def experts_of(model: Mapping[str, Any]) -> int | None:
    """How many a config.json says; None: it is dense."""
    return next((model[name] for name in EXPERT_COUNTS if model.get(name)), None)


def shape_problems(shape: Shape, world_size: int, model: Mapping[str, Any]) -> list[str]:
    """Everything that does not divide, with the nearest values that do."""
    problems: list[str] = []

    def must_divide(option: str, size: int, what: str, count: int | None) -> None:
        if count and count % size:
            problems.append(
                f"backend.{option} = {size}: does not divide the model's {count} {what}; the nearest that do: "
                f"{nearest(size, divisors(count))}."
            )

    heads = model.get("num_attention_heads")
    must_divide("tensor_model_parallel_size", shape.tp, "attention heads", heads)
    groups = model.get("num_key_value_heads")
    if groups and "kv_lora_rank" not in model and groups % shape.tp and shape.tp % groups:
        fits = [size for size in divisors(heads or groups) if not groups % size or not size % groups]
        problems.append(
            f"backend.tensor_model_parallel_size = {shape.tp}: ranks share the model's {groups} key-value heads, or heads "
            f"ranks; neither number divides the other; the nearest that do: {nearest(shape.tp, fits)}."
        )
    must_divide("tensor_model_parallel_size", shape.tp, "hidden features", model.get("hidden_size"))
    must_divide("tensor_model_parallel_size", shape.tp, "MLP features", model.get("intermediate_size"))
    must_divide("tensor_model_parallel_size", shape.tp, "features of latent queries", model.get("q_lora_rank"))
    delta_heads = model.get("linear_num_key_heads")
    if delta_heads and shape.cp > 1 and delta_heads % (shape.tp * shape.cp):
        problems.append(
            f"backend.tensor_model_parallel_size x context_parallel_size = {shape.tp * shape.cp}: ranks share the model's "
            f"{delta_heads} key heads of linear attention; the nearest that do: "
            f"{nearest(shape.tp * shape.cp, divisors(delta_heads))}."
        )
    else:
        must_divide("tensor_model_parallel_size", shape.tp, "key heads of linear attention", delta_heads)
    problems += stage_problems(shape.stages, shape.pp, shape.vpp, model.get("num_hidden_layers"))
    if shape.vpp > 1 and shape.pp == 1:
        problems.append(
            f"backend.virtual_pipeline_model_parallel_size = {shape.vpp}: needs a pipeline_model_parallel_size of at least 2."
        )
    experts = experts_of(model)
    if shape.ep > 1 and not experts:
        problems.append(f"backend.expert_model_parallel_size = {shape.ep}: the model has no experts; leave it out.")
    if experts:
        must_divide("expert_model_parallel_size", shape.ep, "experts", experts)
        must_divide(
            "expert_tensor_parallel_size", shape.etp, "features of an expert", model.get("moe_intermediate_size")
        )
        if shape.tp > 1 and not shape.sequence_parallel:
            problems.append(
                f"backend.tensor_model_parallel_size = {shape.tp}: with experts Megatron wants sequence_parallel = true too."
            )
    elif "kv_lora_rank" in model and shape.tp > 1 and not shape.sequence_parallel:
        problems.append(
            f"backend.tensor_model_parallel_size = {shape.tp}: latent attention wants sequence_parallel = true too."
        )
    if shape.sequence_parallel and shape.tp == 1:
        problems.append("backend.sequence_parallel = true: needs a tensor_model_parallel_size of at least 2.")
    dense = shape.tp * shape.pp * shape.cp
    if world_size % dense:
        problems.append(
            f"tensor x pipeline x context parallel = {shape.tp} x {shape.pp} x {shape.cp} = {dense}: does not divide the "
            f"{world_size} ranks; the nearest numbers of ranks: {multiples(world_size, dense)}."
        )
    sparse = shape.etp * shape.ep * shape.pp
    if world_size % sparse and sparse != dense:
        problems.append(
            f"expert tensor x expert x pipeline parallel = {shape.etp} x {shape.ep} x {shape.pp} = {sparse}: does not "
            f"divide the {world_size} ranks; the nearest numbers of ranks: {multiples(world_size, math.lcm(sparse, dense))}."
        )
    return problems


def multiples(number: int, of: int) -> str:
    below = number // of * of
    return " or ".join(str(value) for value in (below, below + of) if value)
