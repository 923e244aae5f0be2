"""Runs a model with the invariant kernels, however it is written: operations are replaced as torch dispatches them.

The mode is below autograd: a backward is the operation's own, and runs outside. An operation that is neither replaced nor known
to be the same for every batch raises an error with its name, so that no model is silently computed another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_core.errors import ModelError
from slime_training.batch_invariant.products import add_product, multiply, multiply_each
from slime_training.batch_invariant.sums import log_softmax, log_sum_exp, sum_of_last

aten = torch.ops.aten


def sum_over(
    x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Softmax of the last dimension, the only one that models use."""
    if dims is None or [dim % x.dim() for dim in dims] != [x.dim() - 1]:
        raise ModelError(f"true_on_policy_mode: a sum over dimensions {dims} of {x.dim()}; only the last is computed.")
    total = sum_of_last(x if dtype is None else x.to(dtype))
    return total[..., None] if keepdim else total


def mean_over(
    x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return sum_over(x, dims, keepdim, dtype=dtype) / x.shape[-1]


def log_sum_exp_over(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    if [dim % x.dim() for dim in dims] != [x.dim() - 1]:
        raise ModelError(
            f"true_on_policy_mode: logsumexp over dimensions {dims} of {x.dim()}; only the last is computed."
        )
    total = log_sum_exp(x)
    return total[..., None] if keepdim else total


def log_softmax_over(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if dim % x.dim() != x.dim() - 1:
        raise ModelError(
            f"true_on_policy_mode: log_softmax over dimension {dim} of {x.dim()}; only the last is computed."
        )
    return log_softmax(x)


def softmax_over(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return log_softmax_over(x, dim, half_to_float).exp()


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, with the means and inverse deviations that its backward reads."""
    if len(shape) != 1:
        raise ModelError(f"true_on_policy_mode: a layer norm over {len(shape)} dimensions; only one is computed.")
    wide = widened(x)
    mean = mean_over(wide, [-1], True)
    centred = wide - mean
    rstd = (mean_over(centred * centred, [-1], True) + eps).rsqrt()
    out = centred * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, rstd


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# torch's own kernels use a second formula for the elements that do not fill a vector.
def sigmoid(x: Tensor) -> Tensor:
    return (1 + (-widened(x)).exp()).reciprocal().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    wide = widened(x)
    return (wide / (1 + (-wide).exp())).to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = widened(x)
    if approximate == "tanh":
        inner = (wide + wide * wide * wide * 0.044715) * math.sqrt(2 / math.pi)
        return (wide * (inner.tanh() + 1) * 0.5).to(x.dtype)
    return (wide * ((wide * math.sqrt(0.5)).erf() + 1) * 0.5).to(x.dtype)


def power(x: Tensor, exponent: float) -> Tensor:
    if exponent == 2:
        return x.mul(x)
    if exponent == 3:
        return x.mul(x).mul(x)
    raise ModelError(f"true_on_policy_mode: a power of {exponent}; only squares and cubes are computed.")


REPLACED: Final[dict[Any, Callable[..., Any]]] = {
    aten.mm.default: multiply,
    aten.addmm.default: add_product,
    aten.bmm.default: multiply_each,
    aten.sum.dim_IntList: sum_over,
    aten.mean.dim: mean_over,
    aten.logsumexp.default: log_sum_exp_over,
    aten.native_layer_norm.default: layer_norm,
    aten._log_softmax.default: log_softmax_over,
    aten._softmax.default: softmax_over,
    aten.sigmoid.default: sigmoid,
    aten.silu.default: silu,
    aten.gelu.default: gelu,
    aten.pow.Tensor_Scalar: power,
}

_ROUNDED_ALIKE: Final = (
    "add sub rsub mul div neg abs sqrt rsqrt reciprocal relu exp log cos sin tanh erf maximum minimum max amax argmax clamp "
    "clamp_min clamp_max where masked_fill eq ne lt le gt ge logical_not logical_and logical_or bitwise_not bitwise_and "
    "bitwise_or tril triu any all"
)  # fmt: skip
_ONLY_MOVED: Final = (
    "view _unsafe_view reshape _reshape_alias expand permute transpose t unsqueeze squeeze slice select split "
    "split_with_sizes split_with_sizes_copy unbind cat stack clone copy _to_copy detach alias lift_fresh as_strided embedding "
    "index index_select index_copy index_put gather scatter scatter_add constant_pad_nd repeat arange empty empty_like "
    "empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full full_like fill zero "
    "scalar_tensor _local_scalar_dense _foreach_copy set resize record_stream is_same_size unfold movedim flatten"
)  # fmt: skip
HARMLESS: Final = frozenset(f"{_ROUNDED_ALIKE} {_ONLY_MOVED}".split())
"""Names in `aten`, without overloads, and without the underscore of in-place variants."""


class InvariantKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with InvariantKernels():` around a forward. ModelError names an operation that has no kernel here.

    `gather_weights`: namespaces of operations that only gather weights before they are used.
    """

    def __init__(self, gather_weights: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compute_nothing = frozenset({"profiler", *gather_weights})

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        # Subclasses such as DTensor dispatch again with their local shard.
        if types or func.namespace in self._compute_nothing:
            return func(*args, **keywords)
        replacement = REPLACED.get(func)
        if replacement is not None:
            return replacement(*args, **keywords)
        if func.namespace == "aten" and func._schema.name.removeprefix("aten::").rstrip("_") in HARMLESS:
            return func(*args, **keywords)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **keywords)
        raise ModelError(
            f"true_on_policy_mode: the model computes {func}, for which there is no batch-invariant kernel. Leave the mode off "
            "for this model."
        )
