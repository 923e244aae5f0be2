"""Parameters that are float32 in a half-precision folder."""

from __future__ import annotations

from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from slime_fsdp.adapters import base_name
from slime_fsdp.folder import ModelFolder
from slime_training.file_form import is_as_in_files


def fp32_params(model: PreTrainedModel, folder: ModelFolder) -> frozenset[str]:
    """Names of the parameters in the base model; tied ones under each of their names."""
    if not folder.wide:
        return frozenset()
    parameters = {base_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    if is_as_in_files(model):
        return folder.wide & parameters.keys()
    return frozenset(
        name
        for name, tensor in parameters.items()
        if revert_weight_conversion(model, {name: tensor.to("meta")}).keys() <= folder.wide
    )
