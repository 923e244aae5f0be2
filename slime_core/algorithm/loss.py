"""TokenObjective: the loss of one micro-batch as one dot product with the loss weights.

loss = w . (c x L - entropy_coef x H + kl_loss_coef x KL), with w the loss weights, c the off-policy correction, L the
policy loss, H the entropy, KL the estimate against the reference. Every metric is a dot product with the same w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from slime_core.contracts.backend import ObjectiveOutput
from slime_core.contracts.correction import OffPolicyCorrection
from slime_core.contracts.kl import KlEstimator
from slime_core.contracts.loss import LossInputs, PolicyLoss, Segments
from slime_core.contracts.needs import Need
from slime_core.errors import TrainingError
from slime_core.registry.boundary import foreign, require
from slime_core.types.microbatch import MicroBatch

MAX_LOG_RATIO = 20.0
FIELD_OF: Final = {need: need.value for need in Need} | {Need.VALUES: "old_values"}
"""Field of `LossInputs` for each need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenObjective:
    """Built from a recipe on every rank; see `slime_core.contracts.backend.Objective`."""

    loss: PolicyLoss
    needs: frozenset[Need]
    """Needs of the loss; other inputs are None."""
    reads_values: bool = False
    old_from_current: bool = False
    """The old log-probs are the current ones, detached: for one optimizer step per rollout, if nothing else reads them."""
    old_from_rollout: bool = False
    """The old log-probs are the engine's, so their mismatch is not reported."""
    kl: KlEstimator | None = None
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    report_entropy: bool = True
    corrections: Sequence[tuple[OffPolicyCorrection, frozenset[Need]]] = field(default=())
    """Corrections of the loss stage, in order, each with its needs."""

    @property
    def needs_entropy(self) -> bool:
        return not self.reads_values and (self.report_entropy or self.entropy_has_gradient)

    @property
    def entropy_has_gradient(self) -> bool:
        return self.entropy_coef != 0.0 or Need.ENTROPY in self.needs

    def __call__(
        self,
        micro: MicroBatch,
        *,
        segments: Segments,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
    ) -> ObjectiveOutput:
        columns = micro.columns
        weight, mask = columns.loss_weight, micro.mask
        if weight is None:
            raise ValueError("a micro-batch to be trained on needs its loss_weight column")
        everything = LossInputs(
            mask=mask,
            log_probs=log_probs,
            values=values,
            entropy=entropy,
            advantages=columns.advantages,
            returns=columns.returns,
            old_log_probs=self._old_log_probs(columns.old_log_probs, log_probs),
            old_values=columns.values,
            ref_log_probs=columns.ref_log_probs,
            rollout_log_probs=columns.rollout_log_probs,
            teacher_log_probs=columns.teacher_log_probs,
        )
        with foreign(self.loss, "loss of a micro-batch", error=TrainingError):
            output = self.loss(restrict_inputs(everything, self.needs, self.reads_values), segments)
            metrics = dict(output.metrics)
            require_tokens(self.loss, {"values": output.values, **metrics}, mask)
        policy = torch.where(mask, output.values, 0.0)
        if columns.correction is not None:
            policy = policy * torch.where(mask, columns.correction, 0.0)
        for correction, needs in self.corrections:
            weights, of_correction = self._corrected(correction, needs, everything, segments)
            policy = policy * torch.where(mask, weights, 0.0)
            metrics |= of_correction

        total = policy
        name = "value_loss" if self.reads_values else "pg_loss"
        metrics[name] = policy.detach()
        if entropy is not None:
            metrics["entropy_loss"] = entropy.detach()
            if self.entropy_coef:
                total = total - self.entropy_coef * torch.where(mask, entropy, 0.0)
        if self.kl is not None and log_probs is not None:
            kl = torch.where(mask, self._kl(log_probs, everything), 0.0)
            metrics["kl_loss"] = kl.detach()
            total = total + self.kl_loss_coef * kl
        metrics["loss"] = total.detach()
        if not self.old_from_rollout and columns.rollout_log_probs is not None and everything.old_log_probs is not None:
            metrics["train_rollout_logprob_abs_diff"] = (everything.old_log_probs - columns.rollout_log_probs).abs()

        weight = weight.to(total.dtype)
        # One matrix product for all metrics saves several small kernels per metric.
        stacked = torch.where(mask, torch.stack([value.to(weight.dtype) for value in metrics.values()]), 0.0)
        sums = dict(zip(metrics, (stacked @ weight).unbind(), strict=True))
        return ObjectiveOutput(loss=torch.dot(total, weight), sums=sums)

    def _corrected(
        self, correction: OffPolicyCorrection, needs: frozenset[Need], everything: LossInputs, segments: Segments
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        with foreign(correction, "correct_loss", error=TrainingError):
            output = correction.correct_loss(restrict_inputs(everything, needs, self.reads_values), segments)
            require_tokens(correction, {"weights": output.weights, **output.metrics}, everything.mask)
        return output.weights, output.metrics

    def _old_log_probs(self, column: Tensor | None, log_probs: Tensor | None) -> Tensor | None:
        return log_probs.detach() if self.old_from_current and column is None and log_probs is not None else column

    def _kl(self, log_probs: Tensor, inputs: LossInputs) -> Tensor:
        if self.kl is None or inputs.ref_log_probs is None:
            raise ValueError("the KL term needs the ref_log_probs column")
        # Masked tokens may hold any value, which must not reach exp and its gradient.
        safe_log_probs = torch.where(inputs.mask, log_probs, 0.0)
        safe_ref = torch.where(inputs.mask, inputs.ref_log_probs, 0.0)
        ratio = None
        if self.use_unbiased_kl:
            if inputs.old_log_probs is None:
                raise ValueError("use_unbiased_kl needs the old_log_probs column")
            gap = torch.where(inputs.mask, log_probs - inputs.old_log_probs, 0.0)
            ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        with foreign(self.kl, "estimate", error=TrainingError):
            estimate = self.kl(safe_log_probs, safe_ref, ratio)
            require_tokens(self.kl, {"estimate": estimate}, inputs.mask)
        return estimate


def require_tokens(plugin: object, found: Mapping[str, Tensor], mask: Tensor) -> None:
    """PluginError unless each tensor has one number per token: torch would repeat a single number for all of them."""
    for name, value in found.items():
        fits = isinstance(value, Tensor) and value.shape == mask.shape
        require(fits, plugin, name, value, f"a tensor of shape {tuple(mask.shape)}")


def restrict_inputs(inputs: LossInputs, needs: frozenset[Need], reads_values: bool) -> LossInputs:
    """Keeps only the declared inputs, so that a part that reads others fails at once, not only on some backends."""
    withheld = ["log_probs" if reads_values else "values", *(FIELD_OF[need] for need in Need if need not in needs)]
    nothing: dict[str, Any] = dict.fromkeys(withheld)
    return replace(inputs, **nothing)
