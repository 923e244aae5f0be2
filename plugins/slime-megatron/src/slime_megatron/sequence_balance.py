"""seq_aux_loss: the balance loss of experts for each sequence by itself (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

For a sequence of T tokens, E experts and K experts per token: coefficient x E / (K T) x sum over experts of (tokens that have
the expert among their K best x mean score of the expert). The loss of a step is the mean over its sequences, prompts included,
so it does not depend on how they are packed. Megatron's own takes a micro-batch for sequences of one length, side by side: a
packed one is a single sequence to it.

Legend: N tokens that this rank's routers see, S sequences of a micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime_megatron.forward_input import ForwardInput

KIND: Final = "seq_aux_loss"
"""Its value of `moe_router_load_balancing_type`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """The sequences of a micro-batch, in the part of it that this rank holds."""

    of_tokens: Tensor
    """(N,) int64: number of each token's sequence; S for padding."""
    count: int
    """S"""

    def to(self, device: torch.device) -> Sequences:
        return Sequences(of_tokens=self.of_tokens.to(device), count=self.count)

    def part(self, rank: int, ranks: int) -> Sequences:
        """What a rank has under sequence parallelism."""
        return Sequences(of_tokens=self.of_tokens.chunk(ranks)[rank], count=self.count)


def sequences_of(cu_seqlens: Tensor, count: int, is_padding: Tensor) -> Sequences:
    """`cu_seqlens` (S' + 1,): offsets in what this rank holds, S' >= S. `count`: S, the sequences that are samples.
    `is_padding`: (N,) bool. All on the host."""
    numbers = torch.arange(len(is_padding))
    found = torch.searchsorted(cu_seqlens[1:].long(), numbers, right=True).clamp(max=count)
    return Sequences(of_tokens=found.masked_fill(is_padding, count), count=count)


class SequenceBalance:
    """The loss in the routers of one piece of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = [
            RouterBalance(module)
            for module in model.modules()
            if isinstance(module, TopKRouter) and balances_sequences(module.config)
        ]

    def begin_step(self, weight: float) -> None:
        """`weight`: of one sequence's loss, the step's tokens / its sequences. Megatron divides auxiliary losses by the step's
        tokens."""
        for router in self._routers:
            router.weight = weight

    def before(self, sequences: Sequences | None, *, training: bool) -> None:
        """Sets the sequences of the next forward."""
        for router in self._routers:
            router.sequences.set(sequences, training=training)

    def forget(self) -> None:
        """Ends a step, also one that is interrupted."""
        for router in self._routers:
            router.sequences.forget()


class RouterBalance:
    """Takes the place of a router's own function for this loss."""

    def __init__(self, router: Any) -> None:
        self.weight = 0.0
        self.sequences: ForwardInput[Sequences] = ForwardInput()
        self._now: Sequences | None = None
        self._factor = router.get_aux_loss_coeff(KIND) * router.num_experts
        self._topk, self._group = router.topk, router.tp_cp_group
        router.routing = partial(self._routing, router.routing)
        router._apply_seq_aux_loss = self._apply

    def _routing(
        self, routing: Callable[..., tuple[Tensor, Tensor]], *inputs: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        # Here and not in `_apply`, which Megatron does not call for forwards without gradient.
        self._now = self.sequences.take()
        return routing(*inputs, **more)

    def _apply(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *unused: Any, **unused_too: Any
    ) -> Tensor:
        """Scores (N, E) normalized over the experts, map (N, E) bool. Called by Megatron in training."""
        now = self._now
        if now is None or not now.count:
            return probs
        tokens = expert_tokens(now, routing_map, self._group)
        lengths = tokens.sum(1, keepdim=True) / self._topk
        weights = self._factor * self.weight * tokens / (self._topk * lengths.square())
        # Padding has weight 0. As products of rows, not as sums of each sequence: their gradient needs no atomic additions.
        weights = nn.functional.pad(weights, (0, 0, 0, 1)).index_select(0, now.of_tokens)
        loss = (scores_for_aux_loss * weights).sum()
        scaled: Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return scaled


def expert_tokens(sequences: Sequences, routing_map: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(S, E) float32: tokens of each expert in whole sequences. A collective of the ranks that share them."""
    counts = torch.zeros(sequences.count + 1, routing_map.shape[1], dtype=torch.float32, device=routing_map.device)
    # Sums of whole numbers, exact in any order.
    counts.index_add_(0, sequences.of_tokens, routing_map.float())
    counts = counts[:-1].contiguous()
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts


def balances_sequences(config: TransformerConfig) -> bool:
    kind = config.moe_router_load_balancing_type
    return config.num_moe_experts is not None and KIND in (kind if isinstance(kind, list) else [kind])
