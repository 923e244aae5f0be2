"""New weights for the running model: buckets checked and copied in place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from slime_core.errors import EngineError, near_matches
from slime_core.types.weights import Bucket
from slime_training.file_form import is_as_in_files

_LISTED = 8


class WeightLoader:
    """Takes the buckets of one version after the other, each version from index 0 to the one marked last."""

    def __init__(self, model: PreTrainedModel, engine_index: int) -> None:
        self._engine = f"engine {engine_index}"
        self._model = model
        self._version = -1
        self._next = 0
        self._arrived: set[str] = set()
        self.incomplete = False
        """Some tensors of a version have been copied and others not: nothing may be sampled."""

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers under their names in files; tied names share one tensor. What files hold apart
        and the model as one (experts) comes as views."""
        held: dict[str, Tensor] = dict(self._model.state_dict(keep_vars=True))
        return held if self._is_as_in_files else revert_weight_conversion(self._model, held)

    @cached_property
    def _is_as_in_files(self) -> bool:
        return is_as_in_files(self._model)

    @torch.no_grad()
    def load(self, bucket: Bucket) -> bool:
        """Copies the bucket's tensors; True if with it the version is complete.

        Raises EngineError, and has copied nothing of this bucket, if it is out of order, its bytes do not have its
        checksum, or names, shapes or dtypes are not the model's; at the last bucket also if tensors are missing. The
        version must then be sent again from its first bucket.
        """
        where = f"{self._engine}: bucket {bucket.index} of version {bucket.version}"
        if bucket.index == 0:
            self._version, self._next = bucket.version, 0
            self._arrived = set()
        expected, self._next = self._next, -1
        if (bucket.version, bucket.index) != (self._version, expected):
            wanted = "0" if expected < 0 else f"{expected} of version {self._version}, or 0"
            raise EngineError(f"{where} is out of order: expected index {wanted} to start again.")
        found = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(bucket.data).data)
        if found != bucket.checksum:
            raise EngineError(f"{where} is damaged: checksum {bucket.checksum} was sent, its bytes have {found}.")

        tensors = self._tensors()
        problems = _problems(bucket, tensors)
        if problems:
            raise EngineError(f"{where} does not fit the model: {'; '.join(problems)}.")
        self._copy(bucket, tensors, where)
        self._next = expected + 1
        if not bucket.last:
            return False
        self._check_complete(tensors, where)
        self._next, self.incomplete = -1, False
        return True

    def _copy(self, bucket: Bucket, tensors: dict[str, Tensor], where: str) -> None:
        filled = {tensors[name].data_ptr() for name in self._arrived}
        self.incomplete = True
        offset = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            target = tensors[name]
            end = offset + target.numel() * target.element_size()
            # A copy, because a tensor may start at an odd byte and the buffer may be read-only.
            value = torch.from_numpy(bucket.data[offset:end].copy()).view(getattr(torch, dtype)).reshape(shape)
            offset = end
            if target.data_ptr() in filled and not torch.equal(target.cpu(), value):
                self._next = -1
                raise EngineError(f"{where}: {name} is tied to another tensor of the model, but its values differ.")
            target.copy_(value)
            filled.add(target.data_ptr())
            self._arrived.add(name)

    def _check_complete(self, tensors: dict[str, Tensor], where: str) -> None:
        filled = {tensors[name].data_ptr() for name in self._arrived}
        missing = [name for name, tensor in tensors.items() if tensor.data_ptr() not in filled]
        if missing:
            self._next = -1
            raise EngineError(f"{where} is the last, but tensors of the model are missing: {_listed(missing)}.")

    def checksum(self) -> str:
        """xxh3-64 (hex) over the bytes of all parameters and persistent buffers, one after the other in the order of
        their names, each C-contiguous and little-endian in its own dtype, without names or lengths. Of tied tensors
        only the one that `named_parameters` yields counts (the embedding, not the output head)."""
        once = {name for name, _ in self._model.named_parameters()} | {name for name, _ in self._model.named_buffers()}
        tied = set(self._model.state_dict()) - once
        digest = xxhash.xxh3_64()
        for name, tensor in sorted(self._tensors().items()):
            if name not in tied and tensor.numel():
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _problems(bucket: Bucket, tensors: dict[str, Tensor]) -> list[str]:
    problems = []
    unexpected = [name for name in bucket.names if name not in tensors]
    if unexpected:
        close = near_matches(unexpected[0], tensors)
        hint = f" (close to {unexpected[0]}: {', '.join(close)})" if close else ""
        problems.append(f"unexpected names {_listed(unexpected)}{hint}")
    size = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        if name not in tensors:
            continue
        target = tensors[name]
        size += target.numel() * target.element_size()
        held = str(target.dtype).removeprefix("torch.")
        if tuple(shape) != tuple(target.shape):
            problems.append(f"{name} has shape {tuple(shape)}, the model's is {tuple(target.shape)}")
        if dtype != held:
            problems.append(f'{name} is {dtype}, the model is {held}: set engine.dtype = "{dtype}" or export {held}')
    if not problems and size != bucket.data.nbytes:
        problems.append(f"its tensors need {size} bytes, it holds {bucket.data.nbytes}")
    return problems


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
