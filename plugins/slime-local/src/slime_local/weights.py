"""New weights for the running model: buckets checked and copied in place."""

from __future__ import annotations

from functools import cached_property

import torch
import xxhash
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_training.bucket_order import BucketOrder, missing_error, unexpected_problem
from slime_training.bucket_tensors import tensors_of
from slime_training.file_form import is_as_in_files


class WeightLoader:
    """Takes buckets in their order (`BucketOrder`)."""

    def __init__(self, model: PreTrainedModel, engine_index: int) -> None:
        self._model = model
        self._order = BucketOrder(f"engine {engine_index}")

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers under their names in files; tied names share one tensor. What files hold apart
        and the model as one (experts) comes as views."""
        held: dict[str, Tensor] = dict(self._model.state_dict(keep_vars=True))
        return held if self._is_as_in_files else revert_weight_conversion(self._model, held)

    @cached_property
    def _is_as_in_files(self) -> bool:
        return is_as_in_files(self._model)

    @property
    def incomplete(self) -> bool:
        """Some tensors of a version have been copied and others not: nothing may be sampled."""
        return self._order.incomplete

    @torch.no_grad()
    def load(self, bucket: Bucket) -> bool:
        """Copies the bucket's tensors; True if with it the version is complete.

        Raises EngineError, and has copied nothing of this bucket, if it is out of order, its bytes do not have its
        checksum, or names, shapes or dtypes are not the model's; at the last bucket also if tensors are missing. The
        version must then be sent again from its first bucket.
        """
        where = self._order.expect(bucket)
        tensors = self._tensors()
        problems = _problems(bucket, tensors)
        if problems:
            raise EngineError(f"{where} does not fit the model: {'; '.join(problems)}.")
        self._copy(bucket, tensors, where)
        if bucket.last:
            self._check_complete(bucket, tensors, where)
        self._order.loaded(bucket)
        return bucket.last

    def _copy(self, bucket: Bucket, tensors: dict[str, Tensor], where: str) -> None:
        filled = {tensors[name].data_ptr() for name in self._order.arrived}
        self._order.incomplete = True
        for name, value in tensors_of(bucket):
            target = tensors[name]
            if target.data_ptr() in filled and not torch.equal(target.cpu(), value):
                raise EngineError(f"{where}: {name} is tied to another tensor of the model, but its values differ.")
            target.copy_(value)
            filled.add(target.data_ptr())

    def _check_complete(self, bucket: Bucket, tensors: dict[str, Tensor], where: str) -> None:
        filled = {tensors[name].data_ptr() for name in self._order.arrived_with(bucket)}
        missing = [name for name, tensor in tensors.items() if tensor.data_ptr() not in filled]
        if missing:
            raise missing_error(where, missing)

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
        problems.append(unexpected_problem(unexpected, tensors))
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
