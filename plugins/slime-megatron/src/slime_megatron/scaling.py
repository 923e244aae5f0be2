"""The factor of a step's losses before their backward.

With `calculate_per_token_loss` Megatron sums losses over tokens, and divides gradients by the step's tokens at the end. In
float16 they are larger by that factor until then: a loss scale that suits one step overflows in another with longer prompts.
Here losses are divided by the same number first, so that gradients have their final size, times the loss scale, from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def scale_losses(config: TransformerConfig, optimizer: MegatronOptimizer, tokens: float) -> None:
    """Sets the factor for the next step. `tokens`: of all its micro-batches on all ranks, at least 1."""

    def scaled(loss: Tensor) -> Tensor:
        mean = loss / tokens
        return optimizer.scale_loss(mean) if config.fp16 else mean

    config.grad_scale_func = scaled


def finish_gradients(model: Sequence[nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Calls Megatron's `finalize_model_grads` without `num_tokens`, so that it does not divide by it again."""
    finalize_model_grads(list(model), None, **kwargs)
