"""Permutes tokens by expert, and back, on a rank that has all experts whole.

Megatron's dispatcher copies the counts of tokens to the host in every layer, and splits and joins the tokens by expert, which
is needed only if they come from several ranks. Here the host never waits, sums are made in float32 and in a fixed order, and
both directions are gathers: the backward of one is the forward of the other.

Legend: N tokens, K experts a token, E experts, H hidden; N x K rows, by expert and then by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor, nn

from slime_megatron.experts import GroupedExperts
from slime_training.fusion import fused_by_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOrder:
    counts: Tensor
    """(E,) int64: rows of each expert"""
    token: Tensor
    """(N x K,) int64: token of each row"""
    entry: Tensor
    """(N x K,) int64: index of each row's token and expert in the flattened (N, E)"""
    rows: Tensor
    """(N, K) int64: rows of each token"""

    @staticmethod
    def of(routing_map: Tensor, top_k: int) -> TokenOrder:
        """`routing_map`: (N, E) bool, exactly `top_k` of each token."""
        tokens, experts = routing_map.shape
        counts = routing_map.sum(dim=0)
        # With replay, an engine might return an expert twice. The check runs on the device: the host would wait for its result.
        torch._assert_async(
            counts.sum() == tokens * top_k, "a token is sent to another number of experts than the router's"
        )
        chosen, expert = torch.nonzero_static(routing_map, size=tokens * top_k).unbind(1)
        place = routing_map.t().reshape(-1).cumsum(0)[expert * tokens + chosen] - 1
        choice = torch.empty_like(place).scatter_(0, place, torch.arange(len(place), device=place.device))
        return TokenOrder(
            counts=counts,
            token=chosen[choice],
            entry=(chosen * experts + expert)[choice],
            rows=place.view(tokens, top_k),
        )

    def gathered(self, tokens: Tensor) -> Tensor:
        """(N, H) to (N x K, H)"""
        return tokens.index_select(0, self.token)

    def summed(self, rows: Tensor) -> Tensor:
        """(N x K, H) to (N, H)"""
        return fused_by_rows(sum_of_rows, self.rows, rows) if rows.is_cuda else sum_of_rows(self.rows, rows)


def sum_of_rows(places: Tensor, rows: Tensor) -> Tensor:
    wide = rows[places].to(torch.promote_types(rows.dtype, torch.float32))
    return wide.sum(1).to(rows.dtype)


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        return order.gathered(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.order.summed(grads[0]), None


class FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        return order.summed(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.order.gathered(grads[0]), None


class LocalDispatcher(MoETokenDispatcher):
    """Replaces Megatron's dispatcher if no other rank has experts or parts of them."""

    def __init__(self, config: Any, groups: ProcessGroupCollection) -> None:
        super().__init__(config, groups)
        self._order: TokenOrder
        self._shape: torch.Size

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._shape = hidden_states.shape
        self._order = TokenOrder.of(routing_map, self.config.moe_router_topk)
        rows = Permute.apply(hidden_states.reshape(-1, self._shape[-1]), self._order)
        return rows, probs.flatten().gather(0, self._order.entry)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        return hidden_states, self._order.counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        output: Tensor = FromExperts.apply(hidden_states, self._order).view(self._shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


def order_tokens_here(model: nn.Module, config: Any) -> None:
    """Replaces the dispatcher in layers with grouped experts, if this rank has all of them whole."""
    for layer in model.modules():
        if not isinstance(layer, MoELayer) or not isinstance(layer.experts, GroupedExperts):
            continue
        theirs = layer.token_dispatcher
        alone = theirs.ep_size == theirs.tp_size == 1 and isinstance(theirs, MoEAlltoAllTokenDispatcher)
        if alone and not config.moe_permute_fusion:
            groups = ProcessGroupCollection(ep=theirs.ep_group, expt_tp=theirs.tp_group, tp_ep=theirs.tp_ep_group)
            layer.token_dispatcher = LocalDispatcher(config, groups)
            if theirs.shared_experts is not None:
                layer.token_dispatcher.set_shared_experts(theirs.shared_experts)
