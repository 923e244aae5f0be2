"""Weights out: whole tensors under their Hugging Face names, in buckets or as a folder.

Names and shapes are those of the files that transformers would write: where a model keeps fused tensors in memory
(experts), they are taken apart again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from slime_core.types.weights import Bucket
from slime_fsdp.folder import ModelFolder
from slime_fsdp.packed_model import PackedModel

LAYER = re.compile(r"^.*?\.\d+\.")


def whole_tensors(packed: PackedModel, dtype: torch.dtype, *, keep: bool) -> Iterator[dict[str, Tensor] | None]:
    """The model a layer at a time; None on ranks that do not `keep` it but take part in gathering. Parameters come as
    `dtype`, buffers as they are."""
    state = packed.model.state_dict()
    parameters = {name for name, _ in packed.model.named_parameters(remove_duplicate=False)}
    for _, names in groupby(packed.weight_names(), key=layer_of):
        layer: dict[str, Tensor] = {}
        for name in names:
            tensor = state[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                layer[name] = whole.to(dtype) if name in parameters else whole
        yield revert_weight_conversion(packed.model, layer) if keep else None


def layer_of(name: str) -> str:
    """`model.layers.3.` of a name in it; the name itself elsewhere."""
    found = LAYER.match(name)
    return found.group(0) if found else name


def buckets_of(
    layers: Iterable[dict[str, Tensor] | None], *, version: int, bucket_bytes: int
) -> Iterator[Bucket | None]:
    """Rank 0 gives a bucket as soon as one is full, and holds one back to know which is the last. The other ranks give
    one None per layer."""
    pending: list[tuple[str, Tensor]] = []
    size = index = 0
    for layer in layers:
        if layer is None:
            yield None
            continue
        for name, tensor in layer.items():
            if pending and size + tensor.nbytes > bucket_bytes:
                yield make_bucket(pending, version=version, index=index, last=False)
                pending, size, index = [], 0, index + 1
            pending.append((name, tensor))
            size += tensor.nbytes
    if pending:
        yield make_bucket(pending, version=version, index=index, last=True)


def make_bucket(tensors: list[tuple[str, Tensor]], *, version: int, index: int, last: bool) -> Bucket:
    flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])
    data: np.ndarray = flat.cpu().numpy()
    return Bucket(
        version=version,
        index=index,
        last=last,
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        data=data,
        checksum=xxhash.xxh3_64_hexdigest(data),
    )


def write_folder(packed: PackedModel, source: ModelFolder, target: Path, *, first: bool) -> None:
    """What transformers' from_pretrained reads, in the source's dtype. All ranks call; the first one writes."""
    weights: dict[str, Tensor] = {}
    for layer in whole_tensors(packed, source.dtype, keep=first):
        # clone: on one rank a tensor of the same dtype is the parameter itself.
        weights |= {name: tensor.detach().cpu().clone() for name, tensor in (layer or {}).items()}
    if not first:
        return
    target.mkdir(parents=True, exist_ok=True)
    huggingface_hub.save_torch_state_dict(weights, target)
    config = deepcopy(packed.model.config)
    config.architectures = [type(packed.model).__name__]
    config.dtype = source.dtype
    config.save_pretrained(target)
    generation = source.path / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, target / generation.name)
