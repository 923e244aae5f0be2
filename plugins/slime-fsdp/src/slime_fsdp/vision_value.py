"""A value model of the Qwen3-VL family, which transformers does not have."""

from __future__ import annotations

from transformers import AutoModelForTokenClassification, Qwen3VLConfig
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel


class Qwen3VLForTokenClassification(GenericForTokenClassification, Qwen3VLPreTrainedModel):
    """Has the form of transformers' token classifiers of language models: the model without its head under `model`, and a
    linear `score`."""


AutoModelForTokenClassification.register(Qwen3VLConfig, Qwen3VLForTokenClassification, exist_ok=True)
