"""Whether a transformers model holds its tensors in the same form as its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def is_as_in_files(model: PreTrainedModel) -> bool:
    """False if transformers fuses tensors that are separate in files (experts). The check runs transformers' own inverse
    (`revert_weight_conversion`) over the whole model."""
    from transformers.core_model_loading import revert_weight_conversion

    none: dict[str, Tensor] = {}
    # A tensor without a conversion is returned unchanged.
    return revert_weight_conversion(model, none) is none
