"""Splits the weights that a rank of a server holds into parts of the tensors in the model's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from slime_sglang.server.sizes import CheckpointSizes
from slime_transports.places import Place

if TYPE_CHECKING:
    from torch import Tensor

VISION: Final = "visual"
LEVELS: Final = {"model": "model.language_model", VISION: f"model.{VISION}"}
QKV: Final = ("q_proj", "k_proj", "v_proj")
GATE_UP: Final = ("gate_proj", "up_proj")
FUSED_A: Final = "fused_qkv_a_proj_with_mqa"
FUSED_INDEX: Final = "wk_weights_proj"
PLAIN: Final = ("weight", "bias", "e_score_correction_bias")
UNQUANTIZED: Final = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
REORDERED: Final = (
    "load_up_proj_weight_first",
    "w13_swiglu_interleaved",
    "use_flashinfer_trtllm_moe",
    "use_triton_kernels",
)
"""Attributes that are true for a quantization method whose kernel requires experts in its own order."""
EXPERTS: Final[Mapping[re.Pattern[str], tuple[str, str, str]]] = {
    re.compile(r"model\.layers\.\d+\.mlp\.experts"): (*GATE_UP, "down_proj"),
    re.compile(r"model\.layers\.\d+\.block_sparse_moe\.experts"): ("w1", "w3", "w2"),
}
"""Module paths of experts that files have one by one, with the names of gate, up and down; the second is Mixtral's. Experts
of models with a vision tower are one tensor."""


class UnknownPart(NotImplementedError):
    """It is not known which tensor of the model's files this parameter is a part of."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """`tensor`: a rank's part of the tensor `name`, which begins at index `start` of dimension `dim`."""

    name: str
    dim: int
    start: int
    tensor: Tensor

    @property
    def place(self) -> Place:
        return Place(
            name=self.name,
            dim=self.dim,
            start=self.start,
            length=self.tensor.shape[self.dim] if self.tensor.dim() else 1,
            dtype=str(self.tensor.dtype).removeprefix("torch."),
        )


def skipped(config: Any) -> list[str]:
    """Prefixes of names that are in the files but are not loaded: layers of multi-token prediction."""
    first = getattr(config, "num_hidden_layers", 0)
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    return [f"model.layers.{number}." for number in range(first, first + further)]


def parts_of(model: Any, *, ranks: int = 1) -> Iterator[Part]:
    """Yields the parts of a model of SGLang, without padding. A tensor may have several parts, and a part may be yielded
    twice: for duplicated experts, and for a copy with another content.

    `ranks`: number of processes of the server. Raises UnknownPart for a parameter whose tensor is not known (quantized, in
    the order of a kernel, under names that files do not have, or sharded by a loader of its own).
    """
    sizes = CheckpointSizes.of(model.config)
    seen: set[int] = set()
    latent: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for own_path, module in model.named_modules():
        path = checkpoint_name(own_path) if hasattr(model, VISION) else own_path
        if hasattr(module, FUSED_A):
            kv = module.kv_lora_rank + module.qk_rope_head_dim
            latent[f"{path}.{FUSED_A}"] = ("q_a_proj", "kv_a_proj_with_mqa"), (module.q_lora_rank, kv)
        if hasattr(module, FUSED_INDEX):
            latent[f"{path}.{FUSED_INDEX}"] = ("wk", "weights_proj"), (module.head_dim, module.n_heads)
        if getattr(module, "w_kc", None) is not None:
            yield from absorbed(path, module, sizes)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if path in latent:
                require_plain(f"{path}.{own}", own, module, parameter)
                yield from replicated(f"{path}.{own}", path, *latent[path], parameter)
            else:
                yield from parts_of_parameter(path, own, module, parameter, sizes, ranks=ranks)


def parts_of_parameter(
    path: str, own: str, module: Any, parameter: Tensor, sizes: CheckpointSizes, *, ranks: int
) -> Iterator[Part]:
    """Yields the parts of one parameter. SGLang stacks projections with the same input, and pads the vocabulary and, on a
    CPU, MLPs and heads."""
    from sglang.srt.layers.linear import (
        ColumnParallelLinear,
        LinearBase,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    name = f"{path}.{own}"
    if isinstance(module, FusedMoE):
        yield from experts(name, module, parameter, sizes)
        return
    require_plain(name, own, module, parameter)
    if isinstance(module, VocabParallelEmbedding):
        held = module.shard_indices
        yield from cut(name, 0, held.org_vocab_start_index, parameter[: held.num_org_elements], None)
        return
    if ranks > 1:
        require_own_loader(name, module, parameter)
    if not isinstance(module, LinearBase):
        yield Part(name, 0, 0, parameter)
    elif isinstance(module, QKVParallelLinear):
        yield from heads(name, module, parameter, sizes)
    elif isinstance(module, MergedColumnParallelLinear):
        width = sizes.mlp(path)
        local = [size // module.tp_size for size in module.output_sizes]
        names = in_place_of(name, "gate_up_proj", GATE_UP, parameter, local)
        for part, piece in zip(names, parameter.split(local), strict=True):
            yield from cut(part, 0, module.tp_rank * piece.shape[0], piece, width)
    elif isinstance(module, ColumnParallelLinear):
        start = module.tp_rank * parameter.shape[0]
        yield from cut(name, 0, start, parameter, sizes.outputs(path, module.output_size))
    elif isinstance(module, RowParallelLinear):
        if own == "bias":
            yield Part(name, 0, 0, parameter)
        else:
            start = module.tp_rank * parameter.shape[1]
            yield from cut(name, 1, start, parameter, sizes.inputs(path, module.input_size))
    elif isinstance(module, ReplicatedLinear):
        yield Part(name, 0, 0, parameter)
    else:
        raise UnknownPart(f"which part of {name} a {type(module).__name__} has is not known")


def require_plain(name: str, own: str, module: Any, parameter: Tensor) -> None:
    from sglang.srt.layers.linear import LinearBase

    if own not in PLAIN or not parameter.is_floating_point() or parameter.element_size() < 2:
        raise UnknownPart(f"what {name} is made of is not known")
    method = getattr(module, "quant_method", None)
    plain = method is None or type(method).__name__ in UNQUANTIZED
    matrix = parameter.dim() == 2 or own != "weight" or not isinstance(module, LinearBase)
    if not plain or not matrix or getattr(module, "use_intel_amx_backend", False):
        raise UnknownPart(f"{name} of {tuple(parameter.shape)} ({type(method).__name__}) is not a plain matrix")
    if getattr(module, "use_presharded_weights", False):
        raise UnknownPart(f"{name} comes from files that are sharded already")


def require_own_loader(name: str, module: Any, parameter: Tensor) -> None:
    """Raises UnknownPart if the model replaces the layer's loader: such a loader may shard differently."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    loader = getattr(parameter, "weight_loader", default_weight_loader)
    if loader is not default_weight_loader and getattr(loader, "__self__", None) is not module:
        raise UnknownPart(f"how the loader of {name} shards it is not known")


def cut(name: str, dim: int, start: int, tensor: Tensor, size: int | None) -> Iterator[Part]:
    """The part without padding, which is what exceeds `size`."""
    length = tensor.shape[dim] if size is None else min(tensor.shape[dim], size - start)
    if length > 0:
        yield Part(name, dim, start, tensor.narrow(dim, 0, length))


def heads(name: str, module: Any, parameter: Tensor, sizes: CheckpointSizes) -> Iterator[Part]:
    """Yields queries, keys and values of a stacked parameter. Ranks share keys and values if there are fewer heads than
    ranks."""
    v_size = getattr(module, "v_head_size", module.head_size)
    local = [
        module.num_heads * module.head_size,
        module.num_kv_heads * module.head_size,
        module.num_kv_heads * v_size,
    ]
    shared = getattr(module, "kv_tp_rank", module.tp_rank) // module.num_kv_head_replicas
    q_heads, kv_heads = module.total_num_heads, module.total_num_kv_heads
    tower = f".{VISION}." in f".{name}"
    if not tower:
        q_heads, kv_heads = sizes.heads(q_heads), sizes.kv_heads(kv_heads)
    whole = (q_heads * module.head_size, kv_heads * module.head_size, kv_heads * v_size)
    if tower:
        # The files have the three in one tensor.
        names: Sequence[str] = [name.replace(".qkv_proj.", ".qkv.")] * 3
        if module.tp_size == 1:
            yield Part(names[0], 0, 0, parameter)
            return
        if q_heads != sizes.tower_heads:
            raise UnknownPart(f"which heads of {name} are padding is not known")
        before = (0, whole[0], whole[0] + whole[1])
    else:
        names, before = in_place_of(name, "qkv_proj", QKV, parameter, local), (0, 0, 0)
    ranks = (module.tp_rank, shared, shared)
    for part, piece, rank, size, offset in zip(names, parameter.split(local), ranks, whole, before, strict=True):
        yield from cut(part, 0, offset + rank * piece.shape[0], piece, offset + size)


def absorbed(path: str, module: Any, sizes: CheckpointSizes) -> Iterator[Part]:
    """Yields `kv_b_proj` from the copies that latent attention keeps, if they differ from `kv_b_proj`. w_kc (heads, nope,
    rank) multiplies queries, and w_vc (heads, rank, v) multiplies the attention output."""
    import torch

    k, v, source = module.w_kc, module.w_vc.transpose(1, 2), module.kv_b_proj
    require_plain(f"{path}.kv_b_proj.weight", "weight", source, source.weight)
    whole = source.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    halves = whole[:, : module.qk_nope_head_dim], whole[:, module.qk_nope_head_dim :]
    if (k.shape, v.shape) != (halves[0].shape, halves[1].shape) or not k.dtype == v.dtype == whole.dtype:
        raise UnknownPart(f"{path}: w_kc {tuple(k.shape)} and w_vc {tuple(v.shape)} are not the halves of kv_b_proj")
    if not (torch.equal(k, halves[0]) and torch.equal(v, halves[1])):
        both = torch.cat([k, v], dim=1).flatten(0, 1)
        start = source.tp_rank * both.shape[0]
        yield from cut(
            f"{path}.kv_b_proj.weight", 0, start, both, sizes.outputs(f"{path}.kv_b_proj", source.output_size)
        )


def experts(name: str, module: Any, tensor: Tensor, sizes: CheckpointSizes) -> Iterator[Part]:
    """Yields the parts of w13 (E, 2 x I, H), gate before up, or of w2 (E, H, I): the rank's experts and its share of their
    width."""
    method = getattr(module, "quant_method", None)
    plain = type(method).__name__ == "UnquantizedFusedMoEMethod" and module.moe_runner_config.is_gated
    packed = getattr(module, "use_intel_amx_backend", False) or getattr(module, "_dwdp_bound", False)
    reordered = any(getattr(method, given, False) for given in REORDERED)
    if not plain or packed or reordered or module.use_presharded_weights or tensor.dim() != 3:
        raise UnknownPart(f"{name} of {tuple(tensor.shape)} is in the order of a kernel")
    path, _, own = name.rpartition(".")
    called = next((names for pattern, names in EXPERTS.items() if pattern.fullmatch(path)), None)
    if called is None or own not in ("w13_weight", "w2_weight"):
        raise UnknownPart(f"what {name} is called in files is not known")
    gate, up, down = called
    width = sizes.experts
    for before, expert in zip(checkpoint_experts(path, module), tensor, strict=True):
        if own == "w2_weight":
            yield from cut(f"{before}.{down}.weight", 1, module.moe_tp_rank * expert.shape[1], expert, width)
        else:
            for part, piece in zip((gate, up), expert.chunk(2), strict=True):
                yield from cut(f"{before}.{part}.weight", 0, module.moe_tp_rank * piece.shape[0], piece, width)


def checkpoint_experts(path: str, module: Any) -> list[str]:
    """Names in files of the rank's experts, in order. A shared expert may follow them."""
    first = getattr(module, "_expert_storage_rank", module.moe_ep_rank) * module._num_local_routed
    numbers: list[int] = list(range(first, first + module._num_local_routed))
    moved = expert_locations(module.layer_id)
    if moved is not None:
        numbers = [moved[number] for number in numbers]
    shared = module.num_fused_shared_experts
    if shared > 1:
        raise UnknownPart(f"{path}: what {shared} shared experts are called in files is not known")
    beside = f"{path.removesuffix('experts')}shared_experts"
    return [f"{path}.{number}" for number in numbers] + [beside] * shared


def expert_locations(layer: int) -> list[int] | None:
    """The expert at each position over all ranks; None: in their own order. Expert balancing moves and duplicates them."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    # It has no entries for the layers of a draft.
    if metadata is None or layer >= len(metadata.physical_to_logical_map):
        return None
    return [int(number) for number in metadata.physical_to_logical_map[layer].tolist()]


def checkpoint_name(path: str) -> str:
    """The name in files of a module path. SGLang drops a level for models with a vision tower."""
    head, dot, rest = path.partition(".")
    return LEVELS.get(head, head) + dot + rest


def in_place_of(name: str, fused: str, names: Sequence[str], tensor: Tensor, sizes: Sequence[int]) -> list[str]:
    if f".{fused}." not in name or len(names) != len(sizes) or sum(sizes) != tensor.shape[0]:
        raise UnknownPart(f"{name} of {tuple(tensor.shape)} is not {', '.join(names)} of {sizes}")
    return [name.replace(f".{fused}.", f".{part}.") for part in names]


def replicated(name: str, path: str, names: Sequence[str], sizes: Sequence[int], tensor: Tensor) -> Iterator[Part]:
    """Yields the parts of a stacked tensor that every rank has whole."""
    called = in_place_of(name, path.rpartition(".")[2], names, tensor, sizes)
    for part, piece in zip(called, tensor.split(list(sizes)), strict=True):
        yield Part(part, 0, 0, piece)
