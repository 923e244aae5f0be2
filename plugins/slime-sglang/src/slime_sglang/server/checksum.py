"""The weights that a server holds, under their Hugging Face names again, and their checksum."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

ACTION: Final = "slime_checksum"
"""Of /weights_checker."""
QKV: Final = ("q_proj", "k_proj", "v_proj")
VISION: Final = "visual"
LEVELS: Final = {"model": "model.language_model", VISION: f"model.{VISION}"}
WIDTH: Final = "original_intermediate_size"
EXPERT_WIDTH: Final = "original_moe_intermediate_size"
GATE_UP: Final = ("gate_proj", "up_proj")
PLAIN: Final = ("weight", "bias", "e_score_correction_bias")
REORDERED: Final = (
    "load_up_proj_weight_first",
    "w13_swiglu_interleaved",
    "use_flashinfer_trtllm_moe",
    "use_triton_kernels",
)
"""What is true of a quantisation method whose kernel wants experts in an order of its own."""
PUBLISHED_ONE_BY_ONE: Final = re.compile(r"model\.layers\.\d+\.mlp\.experts")
"""Where experts are whose files have a gate_proj, an up_proj and a down_proj for each. Mixtral's are called otherwise, and
those beside a vision tower are one tensor."""


def checksum_of_weights(model: Any) -> tuple[str, dict[str, str]]:
    """xxh3-64 (hex) over all weights in the order of their Hugging Face names, without names or lengths; and of each.

    Raises NotImplementedError for a tensor whose Hugging Face parts are not known (quantised, of latent attention, or
    experts in the order of a kernel, or that files have in another form).
    """
    import torch

    whole = xxhash.xxh3_64()
    by_name: dict[str, str] = {}
    for name, tensor in sorted(unfused(model), key=lambda item: item[0]):
        data = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
        whole.update(data)
        by_name[name] = xxhash.xxh3_64_hexdigest(data)
    return whole.hexdigest(), by_name


def unfused(model: Any) -> Iterator[tuple[str, Tensor]]:
    """SGLang stacks projections that read the same input, and pads the vocabulary and, on a CPU, MLPs."""
    from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if getattr(model.config, "kv_lora_rank", None) is not None:
        raise NotImplementedError(f"{ACTION}: which matrices of latent attention are stacked is not known")
    # Where it is padded, the model's own size is kept under this name.
    width = getattr(model.config, WIDTH, None)
    tower = getattr(getattr(model.config, "vision_config", None), WIDTH, None)
    seen: set[int] = set()
    for own_path, module in model.named_modules():
        path = published(own_path) if hasattr(model, VISION) else own_path
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{path}.{own}"
            if isinstance(module, QKVParallelLinear) and own_path.startswith(f"{VISION}."):
                # Vision towers are published with the three in one.
                yield name.replace(".qkv_proj.", ".qkv."), parameter
            elif ".linear_fc1." in name and own_path.startswith(f"{VISION}.blocks."):
                yield name, parameter[:tower]
            elif name.endswith(".linear_fc2.weight") and own_path.startswith(f"{VISION}.blocks."):
                yield name, parameter[:, :tower]
            elif isinstance(module, QKVParallelLinear):
                sizes = (
                    module.total_num_heads * module.head_size,
                    module.total_num_kv_heads * module.head_size,
                    module.total_num_kv_heads * getattr(module, "v_head_size", module.head_size),
                )
                yield from parts(name, "qkv_proj", QKV, parameter, sizes)
            elif ".shared_expert" in name and hasattr(model.config, EXPERT_WIDTH):
                raise NotImplementedError(f"{ACTION}: how much of {name} is padding is not known")
            elif isinstance(module, MergedColumnParallelLinear):
                for part, piece in parts(name, "gate_up_proj", GATE_UP, parameter, module.output_sizes):
                    yield part, piece[:width]
            elif isinstance(module, FusedMoE):
                yield from experts(name, module, parameter, getattr(model.config, EXPERT_WIDTH, None))
            elif isinstance(module, VocabParallelEmbedding):
                yield name, parameter[: module.org_vocab_size]
            elif own in PLAIN and parameter.is_floating_point():
                if isinstance(module, LinearBase) and own == "weight" and parameter.dim() != 2:
                    raise NotImplementedError(f"{ACTION}: {name} is not a plain matrix")
                yield name, parameter[:, :width] if name.endswith(".down_proj.weight") else parameter
            else:
                raise NotImplementedError(f"{ACTION}: what {name} is made of is not known")


def experts(name: str, module: Any, tensor: Tensor, width: int | None) -> Iterator[tuple[str, Tensor]]:
    """Of w13 (E, 2 x I, H), gate above up, or w2 (E, H, I). `width`: of the model's own experts where I is padded."""
    method = getattr(module, "quant_method", None)
    packed = getattr(module, "use_intel_amx_backend", False) or getattr(module, "num_fused_shared_experts", 0)
    plain = type(method).__name__ == "UnquantizedFusedMoEMethod" and not packed
    if not plain or any(getattr(method, said, False) for said in REORDERED) or tensor.dim() != 3:
        raise NotImplementedError(f"{ACTION}: {name} of {tuple(tensor.shape)} is in the order of a kernel")
    path, _, own = name.rpartition(".")
    if PUBLISHED_ONE_BY_ONE.fullmatch(path) is None:
        raise NotImplementedError(f"{ACTION}: what {name} is called in files is not known")
    for number, expert in enumerate(tensor):
        if own == "w2_weight":
            yield f"{path}.{number}.down_proj.weight", expert[:, :width]
        elif own == "w13_weight":
            for part, piece in zip(GATE_UP, expert.chunk(2), strict=True):
                yield f"{path}.{number}.{part}.weight", piece[:width]
        else:
            raise NotImplementedError(f"{ACTION}: what {name} is made of is not known")


def published(path: str) -> str:
    """SGLang drops a level of the names of models with a vision tower."""
    head, dot, rest = path.partition(".")
    return LEVELS.get(head, head) + dot + rest


def parts(
    name: str, fused: str, names: tuple[str, ...], tensor: Tensor, sizes: tuple[int, ...] | list[int]
) -> Iterator[tuple[str, Tensor]]:
    if f".{fused}." not in name or len(names) != len(sizes) or sum(sizes) != tensor.shape[0]:
        raise NotImplementedError(f"{ACTION}: {name} of {tuple(tensor.shape)} is not {', '.join(names)} of {sizes}")
    for part, piece in zip(names, tensor.split(list(sizes)), strict=True):
        yield name.replace(f".{fused}.", f".{part}."), piece
