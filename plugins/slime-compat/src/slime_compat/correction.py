"""OldCorrection: calls an old TIS function. OldReducer: calls an old reducer of the policy loss."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slime_compat.columns import by_sample, joined, rollout_mask_sums
from slime_compat.config import CompatReducerConfig, OldFunctionConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import resolve, takes, wrong_form
from slime_core.contracts.correction import BatchCorrection, OffPolicyCorrection
from slime_core.types.batch import Batch, TokenColumns

TABLE: Final = "algo.corrections"


class OldCorrection(OffPolicyCorrection):
    """The function gets the samples of an optimizer step, where upstream passes those of a micro-batch, and a policy loss of 1
    at each token: the loss that it returns is the weight."""

    def __init__(self, config: OldFunctionConfig) -> None:
        """PluginError if the function is missing."""
        self._asked = f'{TABLE}.path = "{config.path}"'
        self._args = OldArgs({"use_tis": True} | config.args, f"{TABLE}.args")
        self._function = resolve(config.path, config.python_path, where=f"{TABLE}.path")

    def correct_batch(self, batch: Batch, columns: TokenColumns) -> BatchCorrection:
        """ValueError if what it returns does not fit, or is not the loss times a weight."""
        loss = torch.ones(len(batch.mask))
        weighted, masks, metrics = self._call(batch, columns, loss)
        doubled, _, _ = self._call(batch, columns, 2 * loss)
        trained = torch.from_numpy(batch.mask.astype(np.bool_))
        if not torch.equal(doubled[trained], 2 * weighted[trained]):
            raise ValueError(
                f"{self._asked}: it does not multiply the loss by a weight. Write a loss (slime.losses) or a correction "
                "(slime.corrections)."
            )
        keep = joined(masks, batch, self._asked, "the mask")
        return BatchCorrection(
            weights=np.where(trained.numpy(), weighted.numpy(), np.float32(0)).astype(np.float32),
            keep=keep > 0,
            metrics={str(name): self._column(value, batch, str(name)) for name, value in metrics.items()},
        )

    def _call(self, batch: Batch, columns: TokenColumns, loss: Tensor) -> tuple[Tensor, Any, dict[str, Any]]:
        assert columns.old_log_probs is not None
        returned = self._function(
            args=self._args,
            pg_loss=loss,
            train_log_probs=by_sample(batch, columns.old_log_probs),
            rollout_log_probs=by_sample(batch, batch.rollout_log_probs),
            loss_masks=by_sample(batch, batch.mask, torch.int),
            total_lengths=batch.total_length.tolist(),
            response_lengths=batch.response_length.tolist(),
        )
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise ValueError(f"{self._asked}: it must return the loss, the masks and a dict of metrics.")
        weighted, masks, metrics = returned
        if tuple(weighted.shape) != (len(batch.mask),):
            raise ValueError(
                f"{self._asked}: its loss has shape {tuple(weighted.shape)}; it must be ({len(batch.mask)},)."
            )
        return weighted.detach().float(), masks, metrics

    def _column(self, value: Tensor, batch: Batch, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        if tuple(value.shape) != (len(batch.mask),):
            raise ValueError(
                f"{self._asked}: metric {name} has shape {tuple(value.shape)}; it must be ({len(batch.mask)},)."
            )
        return value.detach().float().numpy()


class OldReducer(OffPolicyCorrection):
    """A factor for each token, so that the mean of the run's aggregation becomes the function's sum. Only the policy loss is
    reduced so: the KL and entropy terms keep the aggregation, as upstream."""

    def __init__(self, config: CompatReducerConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._asked = f'{TABLE}.path = "{config.path}"'
        self._per_token = config.aggregation == "token_mean"
        self._function = resolve(config.path, config.python_path, where=f"{TABLE}.path")
        if not takes(self._function, 4):
            form = "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)"
            raise wrong_form(config.path, self._function, f"{TABLE}.path", form)

    def correct_batch(self, batch: Batch, columns: TokenColumns) -> BatchCorrection:
        """ValueError if the function is not a weighted sum, or weighs a sample by others of its micro-batch."""
        weight = self._weights(batch)
        alone = [self._weights(batch.take(np.array([sample]))) for sample in range(batch.num_samples)]
        if not np.allclose(weight, np.concatenate([np.zeros(0), *alone]), rtol=1e-5, atol=0):
            raise ValueError(
                f"{self._asked}: the weight of a sample depends on which others are in its micro-batch, and nothing else of a "
                "run does. Divide by constants, by the sample's own tokens, or choose algo.aggregation."
            )
        factor = weight if self._per_token else weight * np.maximum(rollout_mask_sums(batch), 1)[batch.sample_of_token]
        trained = batch.mask.astype(np.bool_)
        return BatchCorrection(weights=np.where(trained, factor, 0).astype(np.float32), keep=trained)

    def _weights(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(M,) derivative of the reduced loss by the loss of each token."""
        reduce = self._function(
            batch.total_length.tolist(),
            batch.response_length.tolist(),
            by_sample(batch, batch.mask, torch.int),
            self._per_token,
        )
        loss = torch.ones(len(batch.mask), dtype=torch.float64, requires_grad=True)
        reduced = reduce(loss)
        (gradient,) = torch.autograd.grad(reduced, loss)
        other = torch.linspace(-1, 2, len(batch.mask), dtype=torch.float64)
        if not torch.allclose(reduce(other), gradient @ other, rtol=1e-5, atol=1e-9):
            raise ValueError(f"{self._asked}: the reduced loss is no weighted sum of the tokens' losses.")
        return gradient.numpy()
