"""What a step's losses are multiplied by before their backward.

With `calculate_per_token_loss` Megatron has losses be sums over tokens, and divides gradients by the step's tokens once all
are added up. In float16 they are as many times larger until then: a loss scale that a step bears overflows in another whose
prompts are longer. Here losses are divided by the same number, so that gradients are on their way what they are in the end,
times the loss scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def scale_losses(config: TransformerConfig, optimizer: MegatronOptimizer, tokens: float) -> None:
    """For the next step. `tokens`: of all its micro-batches on all ranks, at least 1."""

    def scaled(loss: Tensor) -> Tensor:
        mean = loss / tokens
        return optimizer.scale_loss(mean) if config.fp16 else mean

    config.grad_scale_func = scaled


def finish_gradients(model: Sequence[nn.Module], num_tokens: Tensor | None, **told: Any) -> None:
    """Megatron's own, but not divided by `num_tokens`."""
    finalize_model_grads(list(model), None, **told)
