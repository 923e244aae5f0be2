"""Routing replay: routers use given expert ids in place of their own scores; the ids that they chose are kept by sample.

Megatron's routers call an object for their top k, if they have one. Megatron's own (RouterReplay) is in a list of the
process, and its caller has to set whether a call recomputes an activation. The object here belongs to its router and detects
that by itself.

Legend: N tokens of a micro-batch that this rank holds under context parallelism, n those that its routers see (a slice of N,
padded, under sequence parallelism), L layers with experts in a piece of the model, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_core.contracts.setup import RoutingReplay
from slime_core.errors import ConfigError, ModelError, TrainingError
from slime_core.types.microbatch import MicroBatch
from slime_megatron.forward_input import ForwardInput
from slime_training.key_gather import ALL_GATHER


class Choices:
    """Replaces Megatron's RouterReplay, in one router."""

    def __init__(self) -> None:
        self.replayed: ForwardInput[Tensor] = ForwardInput()
        """Ids (n, K) of a forward; None: the router's own choice."""
        self.chosen: Tensor | None = None
        """(n, K) int64: ids of the last forward with the router's own scores."""

    def forget(self) -> None:
        self.chosen = None
        self.replayed.forget()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(n, E) to (n, K) scores and ids; called by Megatron."""
        ids = self.replayed.take()
        if ids is None:
            assert default_compute_topk is not None
            values, self.chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            return values, self.chosen
        ids = ids.long()
        return scores.gather(1, ids), ids


class Routing:
    """The routers of a rank's pieces of the model, in order."""

    def __init__(self, chunks: Sequence[Any], config: TransformerConfig, replay: RoutingReplay) -> None:
        """Raises ConfigError if an option keeps Megatron's routers from calling the object, ModelError if the model has no
        experts."""
        if config.num_moe_experts is None:
            raise ModelError("routing replay: the model has no experts. Leave train.use_routing_replay out.")
        if config.moe_router_fusion or config.moe_router_load_balancing_type == "sinkhorn":
            raise ConfigError(
                "backend.moe_router_fusion and moe_router_load_balancing_type = sinkhorn: their choice of experts "
                "cannot be replayed. Leave them out, or routing replay."
            )
        self._replay = replay
        self._config = config
        self._sequence_parallel = config.sequence_parallel
        self._layers: list[list[int]] = []
        self._choices: list[list[Choices]] = []
        self._kept: list[dict[int, Tensor]] = [{} for _ in chunks]
        for chunk in chunks:
            # Layers of multi-token prediction are not replayed.
            routers = [module for module in chunk.decoder.modules() if isinstance(module, TopKRouter)]
            self._layers.append([router.layer_number - 1 for router in routers])
            self._choices.append([Choices() for _ in routers])
            for router, choices in zip(routers, self._choices[-1], strict=True):
                router.router_replay = choices

    @property
    def records(self) -> bool:
        return self._replay is RoutingReplay.RECORDED

    def begin_scores(self) -> None:
        """Starts a forward with the trained weights: ids kept from an earlier batch are dropped."""
        self._kept = [{} for _ in self._kept]

    def ids_of(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        """(n, L, K) for each piece of the model, on the host; empty if the engine returned none, as for a batch that trains
        nothing. `micro` is what this rank holds under context parallelism, on the host."""
        if self.records:
            return self._of_scores(micro)
        return () if micro.routed_experts is None else self._of_rollout(micro.routed_experts)

    def _of_rollout(self, ids: Tensor) -> tuple[Tensor, ...]:
        config = self._config
        same = tuple(ids.shape[1:]) == (config.num_layers, config.moe_router_topk)
        found = [ids[:, of_chunk] for of_chunk in self._layers] if same else [ids]
        highest = max((int(of_chunk.max()) for of_chunk in found if of_chunk.numel()), default=0)
        if not same or highest >= config.num_moe_experts:
            raise TrainingError(
                f"routing replay: the engine's expert ids are of {ids.shape[1]} layers, {ids.shape[2]} experts per token and "
                f"ids up to {highest}; the trained model has {config.num_layers} layers and uses {config.moe_router_topk} of "
                f"{config.num_moe_experts} experts."
            )
        return tuple(map(self._sliced, found))

    def _of_scores(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        found = []
        for of_chunk, kept in zip(self._layers, self._kept, strict=True):
            rows = self._distinct(micro.num_tokens, len(of_chunk))
            if of_chunk and micro.samples:
                if missing := [sample for sample in micro.samples if sample not in kept]:
                    raise TrainingError(
                        f"routing replay: sample {missing[0]} of the shard was trained, but its old log-probs are missing."
                    )
                rows = torch.cat([kept[sample] for sample in micro.samples])
            found.append(self._sliced(rows))
        return tuple(found)

    def _distinct(self, rows: int, layers: int) -> Tensor:
        """(rows, L, K) distinct expert ids for padding."""
        return torch.arange(self._config.moe_router_topk, dtype=torch.uint8).expand(rows, layers, -1)

    def _sliced(self, ids: Tensor) -> Tensor:
        """(N, L, K) to (n, L, K)"""
        if not self._sequence_parallel:
            return ids
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        padding = self._distinct(-len(ids) % ranks, ids.shape[1]).to(ids.dtype)
        return torch.cat([ids, padding]).chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]

    def before(self, chunk: int, ids: Sequence[Tensor], *, training: bool, device: torch.device) -> None:
        """Sets the ids (from `ids_of`) for the next forward of a piece."""
        rows = ids[chunk].to(device, non_blocking=True) if ids else None
        for number, choices in enumerate(self._choices[chunk]):
            choices.replayed.set(None if rows is None else rows[:, number], training=training)

    def keep(self, chunk: int, micro: MicroBatch, cp_size: int) -> None:
        """Keeps the ids that the forward of a micro-batch has just chosen. A collective under sequence parallelism."""
        chosen = [choices.chosen for choices in self._choices[chunk] if choices.chosen is not None]
        if not chosen:
            return
        few = self._config.num_moe_experts <= 256
        rows = torch.stack(chosen, dim=1).to(torch.uint8 if few else torch.int32)
        if self._sequence_parallel:
            rows = gathered(rows, parallel_state.get_tensor_model_parallel_group())
        rows = rows[: micro.num_tokens].to("cpu", torch.uint8 if few else torch.int16)
        lengths = (micro.cu_seqlens.diff() // cp_size).tolist()
        # A micro-batch without samples has one sequence of padding.
        self._kept[chunk] |= dict(zip(micro.samples, rows.split(lengths), strict=False))

    def end(self, *, all_trained: bool) -> None:
        """Ends a run through the model. `all_trained`: every layer took part in the backward."""
        left = sum(choices.replayed.left for of_chunk in self._choices for choices in of_chunk)
        for of_chunk in self._choices:
            for choices in of_chunk:
                choices.forget()
        if left and all_trained:
            raise RuntimeError(f"routing replay: {left} forwards of routers were not recomputed in the backward")


def gathered(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, L, K) of every rank, concatenated."""
    out = rows.new_empty((len(rows) * group.size(), *rows.shape[1:]))
    ALL_GATHER(out, rows.contiguous(), group=group)
    return out
