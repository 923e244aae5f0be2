"""OldLoss: calls an old loss function. Upstream passes it logits, of which such functions read log-probs and entropies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from slime_compat.columns import Columns
from slime_compat.config import OldFunctionConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import resolve, takes, wrong_form
from slime_compat.reduced import Reduced
from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_core.registry.boundary import foreign

WHERE: Final = "algo.loss"
COLUMNS: Final = {
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "advantages": "advantages",
    "returns": "returns",
}
"""Field of LossInputs -> upstream's column of a batch."""
MISSING: Final = {
    "ref_log_probs": 'name the loss "compat_ref" (algo.loss.name)',
    "loss_masks": "with context parallelism a rank has parts of samples; sum_of_sample_mean masks tokens",
    "rollout_mask_sums": "the run weighs tokens itself, in place of sum_of_sample_mean",
    "teacher_log_probs": "add the advantage term reverse_kl (slime-distill)",
}
"""Column that a loss function may look for -> what to do."""


class OldLoss(PolicyLoss):
    """The function gets a micro-batch, as upstream. Masked tokens have 0 in every column."""

    def __init__(self, config: OldFunctionConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._title = f'{WHERE}.path = "{config.path}"'
        self._args = OldArgs(config.args, f"{WHERE}.args")
        self._function = resolve(config.path, config.python_path, where=f"{WHERE}.path")
        if not takes(self._function, 4):
            raise wrong_form(config.path, self._function, f"{WHERE}.path", "(args, batch, logits, sum_of_sample_mean)")

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        """PluginError for a function that reads the logits themselves, or returns no sum of reductions."""
        assert inputs.log_probs is not None
        like = inputs.log_probs
        whole = segments.seq_sum(torch.ones_like(like))
        samples = segments.expand(torch.arange(segments.num_samples, dtype=like.dtype, device=like.device)).long()
        counts = torch.bincount(samples, minlength=segments.num_samples).tolist()
        inputs = masked(inputs)
        if not len(like):
            # Only the names of its metrics count.
            output = self._called(one_token(inputs), [1], [1])
            metrics = {name: value[:0] for name, value in output.metrics.items()}
            return LossOutput(values=like * 0.0, metrics=metrics)
        return self._called(inputs, counts, [int(length) for length in whole.tolist()])

    def _called(self, inputs: LossInputs, counts: list[int], lengths: list[int]) -> LossOutput:
        """counts: tokens of each sample that this rank has, of `lengths`."""
        assert inputs.log_probs is not None
        with foreign(self._title, "call"):
            returned = self._function(
                self._args, batch_of(inputs, counts, lengths), Logits(inputs, counts), per_token(inputs)
            )
            if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Reduced):
                raise ValueError(
                    "it must return the loss, a sum of what sum_of_sample_mean returns, and a dict of metrics"
                )
            loss, log = returned
            like = inputs.log_probs
            metrics = {
                str(name): value.tokens if isinstance(value, Reduced) else like.detach() * 0.0 + value
                for name, value in log.items()
            }
        zero = torch.zeros_like(like)
        return LossOutput(
            # With a graph, also if the function has used none of the log-probs.
            values=torch.where(inputs.mask, loss.tokens, zero) + 0.0 * like,
            metrics={name: torch.where(inputs.mask, value.detach(), zero) for name, value in metrics.items()},
        )


@dataclass(frozen=True, slots=True)
class Logits:
    """In place of upstream's logits: what `get_log_probs_and_entropy` computes from them."""

    inputs: LossInputs
    counts: list[int]
    """Tokens of each sample."""

    def sum(self) -> Tensor:
        """0 with a graph: upstream adds `0 * logits.sum()` to losses without tokens."""
        assert self.inputs.log_probs is not None
        return (0.0 * self.inputs.log_probs).sum()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"logits.{name}: a loss has log-probs and entropies of response tokens here, and no logits. Read them by "
            "slime.backends.megatron_utils.loss.get_log_probs_and_entropy, or write a loss (slime.losses)"
        )


def get_log_probs_and_entropy(
    logits: Logits, *, with_entropy: bool = False, **options: Any
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Upstream's function of this name: lists of one (R,) for each sample."""
    if not isinstance(logits, Logits):
        raise TypeError("get_log_probs_and_entropy takes the logits that a loss function gets, unchanged")
    found = {"log_probs": logits.inputs.log_probs} | ({"entropy": logits.inputs.entropy} if with_entropy else {})
    split = {name: list(torch.split(column, logits.counts)) for name, column in found.items() if column is not None}
    assert logits.inputs.log_probs is not None
    return logits.inputs.log_probs.new_zeros(0), split


def per_token(inputs: LossInputs) -> Any:
    """Upstream's `sum_of_sample_mean`, which leaves reducing to the run."""

    def sum_of_sample_mean(values: Tensor) -> Reduced:
        if not isinstance(values, Tensor) or values.shape != inputs.mask.shape:
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"sum_of_sample_mean takes one number per token, {tuple(inputs.mask.shape)}, and got {found}"
            )
        return Reduced(values)

    return sum_of_sample_mean


def batch_of(inputs: LossInputs, counts: list[int], lengths: list[int]) -> Columns:
    """Upstream's columns of a micro-batch, under its names."""
    found: dict[str, Any] = {
        name: list(torch.split(column, counts))
        for field, name in COLUMNS.items()
        if (column := getattr(inputs, field)) is not None
    }
    if counts == lengths:
        found["loss_masks"] = list(torch.split(inputs.mask.int(), counts))
    unread = {name: Unread(name) for name in ("unconcat_tokens", "total_lengths", "tokens")}
    return Columns(found | unread | {"response_lengths": lengths}, missing=MISSING)


class Unread:
    """A column that functions only pass to `get_log_probs_and_entropy`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *values: Any) -> Any:
        raise TypeError(
            f'batch["{self._name}"]: a loss has no prompts here; pass it on to get_log_probs_and_entropy, or write a loss '
            "(slime.losses)"
        )

    __iter__ = __len__ = __getitem__ = _refuse


def masked(inputs: LossInputs) -> LossInputs:
    """0 at masked tokens, where columns may hold anything."""
    columns = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__ if name != "mask"}
    return replace(
        inputs,
        **{name: torch.where(inputs.mask, column, 0.0) for name, column in columns.items() if column is not None},
    )


def one_token(inputs: LossInputs) -> LossInputs:
    """One masked token with the columns of `inputs`."""
    columns = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    return replace(inputs, **{name: column.new_zeros(1) for name, column in columns.items() if column is not None})
