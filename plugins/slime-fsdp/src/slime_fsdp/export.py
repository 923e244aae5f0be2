"""Exports weights: whole tensors under their Hugging Face names, layer by layer or as a folder.

Names and shapes are those of the files that transformers would write: where a model keeps fused tensors in memory
(experts), they are taken apart again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from slime_core.atomic_io.storage import storage_error
from slime_fsdp.adapters import Adapters, base_name, file_name, is_adapter, trained_parameters
from slime_fsdp.folder import ModelFolder
from slime_fsdp.gather import gathered
from slime_fsdp.packed_model import PackedModel
from slime_training.collective_errors import raise_on_all_ranks
from slime_training.rounded_adamw import local
from slime_training.saved_model import write_model
from slime_training.weight_files import copy_generation_and_code

LAYER = re.compile(r"^.*?\.\d+\.")


def whole_tensors(packed: PackedModel, dtype: torch.dtype, *, keep: bool) -> Iterator[dict[str, Tensor] | None]:
    """Yields the model a layer at a time; None on ranks that do not `keep` it but take part in gathering. Parameters are cast
    to `dtype`, except the few that are float32 in the folder; buffers are unchanged."""
    parameters = {base_name(name) for name in packed.parameter_names}
    for layer in merged_layers(packed, keep=keep, dtype=dtype if packed.adapters is None else None):
        if layer is None:
            yield None
            continue
        dtypes = dict.fromkeys(parameters, dtype) | dict.fromkeys(packed.wide, torch.float32)
        stored = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in layer.items()}
        yield stored if packed.is_as_in_files else revert_weight_conversion(packed.model, stored)


def merged_layers(
    packed: PackedModel, *, keep: bool, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor] | None]:
    """Yields tensors in the form of the base model in memory, with adapters merged. The trained weights are unchanged. `dtype`:
    of sharded ones, before they are gathered."""
    tensors = packed.tensors()
    for _, names in groupby(packed.weight_names, key=layer_of):
        layer = gathered({name: tensors[name] for name in names}, dtype, unchanged=packed.wide)
        if keep and packed.adapters is not None:
            layer = packed.adapters.merge(layer)
        yield layer if keep else None


def frozen_names(packed: PackedModel) -> frozenset[str]:
    """Names of whole tensors that neither training nor a merged adapter changes. Tensors that are split for files are left
    out."""
    if packed.adapters is None:
        return frozenset()
    trained = trained_parameters(packed.model)
    return frozenset(
        base_name(name)
        for name in packed.weight_names
        if name not in trained and not is_adapter(name) and base_name(name) == name
    )


def base_shapes(packed: PackedModel) -> dict[str, torch.Size]:
    """Shapes of the tensors that `merged_layers` yields."""
    state = packed.model.state_dict()
    return {base_name(name): state[name].shape for name in packed.weight_names if not is_adapter(name)}


def copy_weights(source: PackedModel, target: PackedModel) -> None:
    """Copies weights between models with the same `base_shapes`; the target has no adapters. All ranks call it."""
    state = target.model.state_dict()
    if source.adapters is None:
        same = source.model.state_dict()
        for name in target.weight_names:
            local(state[name]).copy_(local(same[name]))
        return
    for layer in merged_layers(source, keep=True):
        for name, tensor in (layer or {}).items():
            local(state[name]).copy_(part_of(tensor, like=state[name]))


def part_of(tensor: Tensor, *, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor that every rank has."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


def layer_of(name: str) -> str:
    """The prefix `model.layers.3.` of a name in that layer; otherwise the name itself."""
    found = LAYER.match(name)
    return found.group(0) if found else name


def write_folder(packed: PackedModel, source: ModelFolder, target: Path, *, group: dist.ProcessGroup | None) -> None:
    """Writes a folder for transformers' from_pretrained, with parameters in the dtype of the source's and adapters merged, and
    in adapter/ a folder for peft. All ranks of `group` call it (None: one rank)."""
    if packed.adapters is not None:
        write_adapter(packed, packed.adapters, target / "adapter", group)

    def describe() -> None:
        copy_generation_and_code(source.path, target)
        config = deepcopy(packed.model.config)
        config.architectures = [type(packed.model).__name__]
        config.dtype = source.dtype
        config.save_pretrained(target)

    layers = whole_tensors(packed, source.dtype, keep=True)
    weights = ((name, tensor) for layer in layers for name, tensor in (layer or {}).items())
    write_model(weights, target, describe=describe, group=group)


def adapter_tensors(
    packed: PackedModel, *, keep: bool, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor] | None]:
    """Yields what is trained beside the frozen weights, a layer at a time, under peft's names; None on ranks that do not `keep`
    it but take part in gathering. `dtype`: of all; None: as they are trained."""
    trained = trained_parameters(packed.model)
    for _, names in groupby(trained, key=layer_of):
        layer = gathered({name: trained[name].detach() for name in names}, dtype)
        stored = {file_name(name): tensor if dtype is None else tensor.to(dtype) for name, tensor in layer.items()}
        yield stored if keep else None


def write_adapter(packed: PackedModel, adapters: Adapters, target: Path, group: dist.ProcessGroup | None) -> None:
    """Writes peft's format, with the starting folder as base model."""
    layers = list(adapter_tensors(packed, keep=True))

    def write() -> None:
        weights = {name: tensor.cpu().contiguous() for layer in layers for name, tensor in (layer or {}).items()}
        target.mkdir(parents=True, exist_ok=True)
        save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
        adapters.config.save_pretrained(str(target))

    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    try:
        raise_on_all_ranks(lambda: write() if rank == 0 else None, group, ranks)
    except (OSError, SafetensorError) as error:
        raise storage_error(target, error) from error
