"""Whether a model's new weights can be written over its old ones. vLLM's reload by layers then only costs time: three passes
over the weights in place of one, and Python around every tensor."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

PLAIN: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""On CUDA devices they leave a layer's weights as they were loaded."""


def loads_in_place(model: nn.Module, device: torch.device) -> bool:
    """Whether the kernels of all layers read parameters as a checkpoint has them. Not on a CPU, where vLLM packs matrices, and
    not for quantized layers, mixtures of experts and latent attention."""
    return device.type == "cuda" and all(is_plain(layer) for layer in model.modules())


def is_plain(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    if method is not None:
        return type(method) in PLAIN
    # Without quantized keys and values, attention derives nothing from weights.
    return type(layer) is Attention or not hasattr(layer, "process_weights_after_loading")
