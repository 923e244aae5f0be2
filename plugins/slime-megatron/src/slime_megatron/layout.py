"""Layouts: which ranks share what, and whether a model and a number of ranks can be divided so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slime_megatron.stages import Stages, divisors, nearest, stage_problems

EXPERT_COUNTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of config.json for the number of experts; transformers 5 writes the last one for Qwen3-MoE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    stages: Stages = field(default_factory=Stages)


def ranks_of(shape: ParallelDims) -> int:
    """The smallest number of ranks for such a layout."""
    dense = shape.tp * shape.pp * shape.cp
    return math.lcm(dense, shape.etp * shape.ep * shape.pp)


def experts_of(model: Mapping[str, Any]) -> int | None:
    """The number of experts in the content of a config.json; None: the model is dense."""
    return next((model[name] for name in EXPERT_COUNTS if model.get(name)), None)


def shape_problems(shape: ParallelDims, world_size: int, model: Mapping[str, Any]) -> list[str]:
    """Everything that does not divide, with the nearest values that do."""
    return [
        *tensor_problems(shape, model),
        *delta_problems(shape, model.get("linear_num_key_heads")),
        *pipeline_problems(shape, model.get("num_hidden_layers")),
        *expert_problems(shape, model),
        *sequence_problems(shape, model),
        *rank_problems(shape, world_size),
    ]


def division_problems(option: str, size: int, what: str, count: int | None) -> list[str]:
    if not count or not count % size:
        return []
    return [
        f"backend.{option} = {size}: does not divide the model's {count} {what}; the nearest that do: "
        f"{nearest(size, divisors(count))}."
    ]


def tensor_problems(shape: ParallelDims, model: Mapping[str, Any]) -> list[str]:
    option, heads = "tensor_model_parallel_size", model.get("num_attention_heads")
    problems = division_problems(option, shape.tp, "attention heads", heads)
    groups = model.get("num_key_value_heads")
    if groups and "kv_lora_rank" not in model and groups % shape.tp and shape.tp % groups:
        fits = [size for size in divisors(heads or groups) if not groups % size or not size % groups]
        problems.append(
            f"backend.{option} = {shape.tp}: ranks share the model's {groups} key-value heads, or heads "
            f"share ranks, but neither number divides the other; the nearest that do: {nearest(shape.tp, fits)}."
        )
    return [
        *problems,
        *division_problems(option, shape.tp, "hidden features", model.get("hidden_size")),
        *division_problems(option, shape.tp, "MLP features", model.get("intermediate_size")),
        *division_problems(option, shape.tp, "features of latent queries", model.get("q_lora_rank")),
    ]


def delta_problems(shape: ParallelDims, heads: int | None) -> list[str]:
    """`heads`: key heads of linear attention; None: the model has none."""
    if not heads or shape.cp == 1 or not heads % (shape.tp * shape.cp):
        return division_problems("tensor_model_parallel_size", shape.tp, "key heads of linear attention", heads)
    return [
        f"backend.tensor_model_parallel_size x context_parallel_size = {shape.tp * shape.cp}: ranks share the model's "
        f"{heads} key heads of linear attention; the nearest that do: {nearest(shape.tp * shape.cp, divisors(heads))}."
    ]


def pipeline_problems(shape: ParallelDims, num_layers: int | None) -> list[str]:
    problems = stage_problems(shape.stages, shape.pp, shape.vpp, num_layers)
    if shape.vpp == 1 or shape.pp > 1:
        return problems
    return [
        *problems,
        f"backend.virtual_pipeline_model_parallel_size = {shape.vpp}: requires a pipeline_model_parallel_size of at least 2.",
    ]


def expert_problems(shape: ParallelDims, model: Mapping[str, Any]) -> list[str]:
    experts = experts_of(model)
    if experts:
        width = model.get("moe_intermediate_size")
        return [
            *division_problems("expert_model_parallel_size", shape.ep, "experts", experts),
            *division_problems("expert_tensor_parallel_size", shape.etp, "features of an expert", width),
        ]
    if shape.ep > 1:
        return [f"backend.expert_model_parallel_size = {shape.ep}: the model has no experts. Leave it out."]
    return []


def sequence_problems(shape: ParallelDims, model: Mapping[str, Any]) -> list[str]:
    if shape.sequence_parallel or shape.tp == 1:
        return []
    given = f"backend.tensor_model_parallel_size = {shape.tp}"
    if experts_of(model):
        return [f"{given}: with experts Megatron requires sequence_parallel = true. Set that too."]
    if "kv_lora_rank" in model:
        return [f"{given}: latent attention requires sequence_parallel = true. Set that too."]
    return []


def rank_problems(shape: ParallelDims, world_size: int) -> list[str]:
    problems: list[str] = []
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
