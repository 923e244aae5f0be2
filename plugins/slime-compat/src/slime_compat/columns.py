"""The dict of columns that old functions of a batch get: lists of one tensor per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime_core.types.batch import Batch, TokenColumns


def by_sample(batch: Batch, column: npt.NDArray[Any], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """(M,) to one (R,) for each sample; copies, which a function may write to."""
    whole = torch.tensor(np.asarray(column), dtype=dtype)
    return list(torch.split(whole, batch.response_length.tolist()))


class Columns(dict[str, Any]):
    """KeyError for a column that the run does not compute, with what to set."""

    def __init__(self, columns: Mapping[str, Any], *, missing: Mapping[str, str]) -> None:
        """missing: column that a function may look for -> what to do."""
        super().__init__(columns)
        self._advice = missing

    def __missing__(self, name: str) -> Any:
        advice = self._advice.get(name, "no run has it")
        raise KeyError(f"the batch has no {name}: {advice}. There are {', '.join(sorted(self))}.")


MISSING: Final = {
    "ref_log_probs": 'name the advantage "compat_ref" (algo.advantage.name), which computes them',
    "values": 'name the advantage "compat_values" (algo.advantage.name), with an algorithm that has a critic',
    "teacher_log_probs": "add the advantage term reverse_kl (slime-distill)",
    "multimodal_train_inputs": "images stay on the trainer's ranks",
    "rollout_routed_experts": "expert ids stay on the trainer's ranks",
}
"""Column that a function may look for -> what to do."""


def rollout_data(batch: Batch, columns: TokenColumns, rewards: npt.NDArray[np.float64]) -> Columns:
    """Upstream's columns of a batch, under its names. rewards: (S,) as they are trained on."""
    tokens = torch.tensor(np.asarray(batch.tokens), dtype=torch.long)
    masks = by_sample(batch, batch.mask, torch.int)
    data = {
        "tokens": list(torch.split(tokens, batch.total_length.tolist())),
        "response_lengths": batch.response_length.tolist(),
        "total_lengths": batch.total_length.tolist(),
        "rewards": rewards.tolist(),
        "raw_reward": batch.reward.tolist(),
        "truncated": batch.truncated.astype(int).tolist(),
        "loss_masks": masks,
        "sample_indices": batch.index.tolist(),
        "rollout_ids": batch.rollout_id.tolist(),
        "rollout_mask_sums": rollout_mask_sums(batch).tolist(),
        "rollout_log_probs": by_sample(batch, batch.rollout_log_probs),
    }
    names = {"old_log_probs": "log_probs"}
    present = columns.present().items()
    of_tokens = {names.get(name, name): by_sample(batch, column) for name, column in present}
    return Columns(data | of_tokens, missing=MISSING)


def rollout_mask_sums(batch: Batch) -> npt.NDArray[np.int64]:
    """(S,) trainable tokens of the whole rollout of each sample."""
    _, rollout_of_sample = np.unique(batch.rollout_id, return_inverse=True)
    of_rollout = np.bincount(rollout_of_sample, weights=batch.num_trainable)
    sums: npt.NDArray[np.int64] = of_rollout[rollout_of_sample].astype(np.int64)
    return sums


def joined(values: Any, batch: Batch, asked: str, name: str) -> npt.NDArray[np.float32]:
    """One (R,) for each sample to (M,). ValueError, with the sample, if the lengths do not fit."""
    lengths = batch.response_length.tolist()
    if not isinstance(values, list | tuple) or len(values) != len(lengths):
        count = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise ValueError(
            f"{asked}: {name} has {count}; it must be a list of {len(lengths)} tensors, one for each sample."
        )
    tensors = [torch.as_tensor(value, dtype=torch.float32).detach().reshape(-1) for value in values]
    for index, tensor, length in zip(batch.index.tolist(), tensors, lengths, strict=True):
        if len(tensor) != length:
            raise ValueError(
                f"{asked}: {name} of sample {index} has {len(tensor)} numbers; its response has {length} tokens."
            )
    joined: npt.NDArray[np.float32] = torch.cat([torch.zeros(0), *tensors]).numpy()
    return joined
