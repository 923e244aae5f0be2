"""When the hooks of `backend.hooks` are called."""

from __future__ import annotations

from megatron.core import parallel_state

from slime_core.registry.boundary import foreign
from slime_megatron.gradients import gradient_buffers
from slime_megatron.trainer import Trainer
from slime_training.hooks import HookedStep


def before_log_probs(trainer: Trainer, weights: str) -> None:
    """Call it when the weights are in the model."""
    if trainer.hooks is None:
        return
    for chunk in trainer.chunks:
        chunk.eval()
    with foreign(trainer.hooks, "before_log_probs"):
        trainer.hooks.before_log_probs(trainer.chunks, weights)


def before_train_step(trainer: Trainer, rollout_id: int, step_id: int) -> None:
    """Call it when gradients are zero and the learning rates set. What hooks add to gradients is divided by the number of
    data-parallel ranks: gradients are summed over them here, and Megatron's own training takes their mean."""
    if trainer.hooks is None:
        return
    for chunk in trainer.chunks:
        chunk.train()
    step = HookedStep(
        rollout_id=rollout_id,
        step_id=step_id,
        model=trainer.chunks,
        optimizer=trainer.optimizer,
        schedule=trainer.schedule,
    )
    with foreign(trainer.hooks, "before_train_step"):
        trainer.hooks.before_train_step(step)
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    for buffer in gradient_buffers(trainer.chunks):
        buffer.grad_data.div_(ranks)
