"""Whether a model of transformers holds its tensors as its files do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def is_as_in_files(model: PreTrainedModel) -> bool:
    """False: transformers keeps some as one that files hold apart (experts), and looks through the whole model to take them
    apart again (`revert_weight_conversion`)."""
    from transformers.core_model_loading import revert_weight_conversion

    none: dict[str, Tensor] = {}
    # What has nothing to revert comes back as it is.
    return revert_weight_conversion(model, none) is none
