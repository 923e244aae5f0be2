"""A folder in Megatron's torch_dist: where the newest one is, what is in it, and names that other programs use.

Torch keeps the list of tensors in a pickle. Here only the classes of such a list are allowed in it, so that a folder from
elsewhere cannot run code. common.pt, which other programs fill with objects of their own, is never read.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_outplace,
        extract_matching_values,
        nested_values,
    )
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from slime_core.errors import CheckpointError
from slime_megatron.bridges.bridge import LAYER
from slime_megatron.torch_dist_place import METADATA
from slime_training.listed_names import listed

DATA_MODULES: Final = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
    }
)
"""Their dataclasses and enums are allowed."""
OTHERS: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    }
)
FUSED: Final = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    ("self_attention.linear_proj.post_norm.weight", "post_self_attn_layernorm.weight"),
    ("mlp.linear_fc2.post_norm.weight", "post_mlp_layernorm.weight"),
)
"""Names of norms here, and where Transformer Engine or a layer of another program has them: with the matrix behind them."""
SHOWN: Final = 3


class MetadataUnpickler(pickle.Unpickler):
    """Raises UnpicklingError before anything but a list of tensors is built."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OTHERS:
            return super().find_class(module, name)
        if module in DATA_MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a list of tensors")


class NoCommon(TorchCommonLoadStrategy):
    """Leaves common.pt unread."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {}


def read_metadata(state: Path) -> Metadata:
    """The list of tensors. Raises CheckpointError if it cannot be read, or has anything else in it."""
    try:
        with (state / METADATA).open("rb") as file:
            found = MetadataUnpickler(file).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise CheckpointError(f"{state / METADATA}: cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{state / METADATA}: no list of a checkpoint's tensors.")
    return found


def shapes_in(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    return {
        key: tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def stacks(keys: Collection[str]) -> bool:
    """Whether equal layers are parts of one tensor."""
    return not any(LAYER.match(key) for key in keys)


def key_in(there: Collection[str], key: str) -> str:
    """The name under which a checkpoint has a tensor."""
    if key in there:
        return key
    names = (key.removesuffix(own) + fused for own, fused in FUSED if key.endswith(f".{own}"))
    return next((name for name in names if name in there), key)


def renamed(state: Mapping[str, Any], there: Collection[str]) -> None:
    """Gives the parts of a sharded state the names that a checkpoint has, in place."""
    for part in nested_values(dict(state)):
        if isinstance(part, ShardedTensor | ShardedTensorFactory):
            part.key = key_in(there, part.key)


def parts_of_tensors(state: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """The sharded tensors by name; what factories make is as they make it."""
    made: dict[str, Any] = dict_list_map_outplace(lambda part: part, dict(state))
    apply_factories(made)
    return {part.key: part for part in nested_values(made) if isinstance(part, ShardedTensor)}


def differences(there: Mapping[str, tuple[int, ...]], parts: Mapping[str, ShardedTensor]) -> Iterator[str]:
    """Tensors that a checkpoint does not have, or has in another shape."""
    if missing := sorted(parts.keys() - there.keys()):
        yield f"{len(missing)} of the model's tensors are missing: {listed(missing)}"
    other = [key for key in sorted(parts.keys() & there.keys()) if not fits(there[key], parts[key])]
    for key in other[:SHOWN]:
        yield f"{key} is {there[key]} there and {tuple(parts[key].global_shape)} in the model"


def fits(size: tuple[int, ...], part: ShardedTensor) -> bool:
    """Whether a tensor of `size` fits `part`. Vocabularies are padded to a number of rows that the ranks can divide."""
    shape = tuple(part.global_shape)
    if part.allow_shape_mismatch:
        return size[1:] == shape[1:] and size[0] >= shape[0]
    return size == shape


def load_model(chunks: Sequence[Any], state: Path) -> None:
    """Loads the weights of a torch_dist folder into this rank's pieces of the model, in any layout. All ranks call it. Raises
    CheckpointError if they are not this model's."""
    there = shapes_in(read_metadata(state))
    metadata = None if stacks(there) else {"non_homogeneous_layers": True}
    requested: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        whole = chunk.sharded_state_dict(metadata=metadata)
        requested[str(number)], _ = extract_matching_values(
            whole, lambda part: isinstance(part, ShardedTensor | ShardedTensorFactory)
        )
    renamed(requested, there)
    if problems := list(differences(there, parts_of_tensors(requested))):
        raise CheckpointError(f"{state}: it is not of the trained model: {'; '.join(problems)}.")
    loaded = dist_checkpointing.load(requested, str(state), common_strategy=NoCommon())
    for number, chunk in enumerate(chunks):
        # Extra states of Megatron's modules are left out: they are empty, or of FP8.
        chunk.load_state_dict(loaded[str(number)], strict=False)
