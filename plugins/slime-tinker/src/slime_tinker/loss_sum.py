"""loss_of: the loss of given log-probs, computed by the same plugin as in the trainer, where nothing else is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_core import groups
from slime_core.config.part import BoundPlugin
from slime_core.contracts.loss import LossInputs
from slime_core.registry import Registry
from slime_core.types.batch import Float32, Float64
from slime_session import Datum
from slime_session.datum import columns_of


@dataclass(frozen=True, slots=True, eq=False)
class WholeSamples:
    """`Segments` of datums that are all here."""

    of_token: Tensor
    """(M,) number of the datum."""
    num_samples: int

    def seq_sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.num_samples).index_add(0, self.of_token, values)

    def expand(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.of_token)


def loss_of(registry: Registry, loss: Mapping[str, Any], datums: Sequence[Datum], log_probs: Float32) -> Float64:
    """(M,) loss weight x loss of each response token, in float64."""
    options = dict(loss)
    name = options.pop("name")
    resolved = registry.resolve(groups.LOSSES, name, where="loss_fn")
    part = BoundPlugin.of(resolved, name, options, where="loss_fn", base=Path.cwd())
    columns = columns_of(datums)
    lengths = torch.tensor([datum.response_length for datum in datums])
    masks = [np.asarray(datum.mask, np.bool_) for datum in datums]
    mask = torch.from_numpy(np.concatenate(masks))
    inputs = LossInputs(
        mask=mask,
        log_probs=tensor(log_probs),
        advantages=tensor(columns.advantages),
        old_log_probs=tensor(columns.old_log_probs),
    )
    samples = WholeSamples(torch.repeat_interleave(torch.arange(len(datums)), lengths), len(datums))
    values = part.build()(inputs, samples).values
    assert columns.loss_weight is not None
    weighted: Float64 = (torch.where(mask, values, 0.0) * torch.from_numpy(columns.loss_weight).double()).numpy()
    return weighted


def tensor(column: Float32 | None) -> Tensor | None:
    return None if column is None else torch.from_numpy(column).double()
