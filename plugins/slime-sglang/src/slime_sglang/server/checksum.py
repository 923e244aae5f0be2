"""The weights that a server holds, under their Hugging Face names again, and their checksum."""

from __future__ import annotations

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
GATE_UP: Final = ("gate_proj", "up_proj")


def checksum_of_weights(model: Any) -> tuple[str, dict[str, str]]:
    """xxh3-64 (hex) over all weights in the order of their Hugging Face names, without names or lengths; and of each.

    Raises NotImplementedError for a tensor whose Hugging Face parts are not known (quantised, or fused experts).
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
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

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
            elif isinstance(module, MergedColumnParallelLinear):
                for part, piece in parts(name, "gate_up_proj", GATE_UP, parameter, module.output_sizes):
                    yield part, piece[:width]
            elif isinstance(module, VocabParallelEmbedding):
                yield name, parameter[: module.org_vocab_size]
            elif own in ("weight", "bias") and parameter.is_floating_point():
                if isinstance(module, LinearBase) and own == "weight" and parameter.dim() != 2:
                    raise NotImplementedError(f"{ACTION}: {name} is not a plain matrix")
                yield name, parameter[:, :width] if name.endswith(".down_proj.weight") else parameter
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
