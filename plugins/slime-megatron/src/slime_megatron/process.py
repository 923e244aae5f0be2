"""The process group and Megatron's groups inside it: the caller that created them destroys them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError
from slime_megatron.layout import ParallelDims
from slime_training.process_group import join_group


@dataclass(frozen=True, kw_only=True)
class Ranks:
    shape: ParallelDims
    made_group: bool
    made_layout: bool

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """None: a single rank has whole sequences."""
        return parallel_state.get_context_parallel_group() if self.shape.cp > 1 else None

    def all_agree(self, flag: torch.Tensor) -> bool:
        """True if it is True on every rank."""
        votes = flag.to(torch.float32).reshape(())
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item() > 0)

    def leave(self) -> None:
        if self.made_layout:
            parallel_state.destroy_model_parallel()
        if self.made_group and dist.is_initialized():
            dist.destroy_process_group()


def join(setup: TrainerSetup, shape: ParallelDims) -> Ranks:
    """Joins the default process group, or uses the one that another role of this process has created."""
    made = join_group(setup)
    fresh = not parallel_state.model_parallel_is_initialized()
    if fresh:
        init_model_parallel(shape)
    elif laid_out() != (shape.tp, shape.pp, shape.vpp, shape.cp, shape.ep, shape.etp):
        raise ConfigError(
            f"role {setup.role}: Megatron supports one layout per process, and another role of this process has another "
            "layout. Set the same parallel sizes for both roles, or ranks of their own."
        )
    return Ranks(shape=shape, made_group=made, made_layout=fresh)


def init_model_parallel(shape: ParallelDims, **kwargs: Any) -> None:
    """Creates Megatron's groups in the default process group. `kwargs`: passed to Megatron, beside the sizes."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp if shape.vpp > 1 else None,
        context_parallel_size=shape.cp,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=shape.etp,
        **kwargs,
    )


def laid_out() -> tuple[int, int, int, int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
