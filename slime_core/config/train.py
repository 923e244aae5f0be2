"""The `train` table: batch arithmetic, optimizer, micro-batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_core.config.plugin_table import PluginTable
from slime_core.contracts.optimizer import OptimizerConfig, OptimizerKeys
from slime_core.contracts.paths import RunPath
from slime_core.contracts.table import Table


class OptimizerOverrides(Table):
    """The same keys for one role; what is left out is as in the train table."""

    optimizer: PluginTable | None = None
    """Optimizer of this role."""
    lr: float | None = Field(None, gt=0)
    """Highest learning rate."""
    min_lr: float | None = Field(None, ge=0)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] | None = None
    """Shape after warm-up."""
    lr_warmup_iters: int | None = Field(None, ge=0)
    """Optimizer steps of linear warm-up, counted from the role's own first step."""
    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1)
    """The warm-up as a share of this role's steps until min_lr."""
    lr_decay_iters: int | None = Field(None, gt=0)
    """Optimizer steps of this role until min_lr."""
    weight_decay: float | None = Field(None, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float | None = Field(None, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float | None = Field(None, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float | None = Field(None, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float | None = Field(None, ge=0)
    """Global gradient norm is cut to this; 0: never."""

    def optimizer_config(self, train: OptimizerConfig) -> OptimizerConfig:
        """`train` with the settings of this table in place of its own."""
        given = {name: getattr(self, name) for name in OptimizerKeys.model_fields}
        given["optimizer"] = self.optimizer and self.optimizer.name
        given = {name: value for name, value in given.items() if value is not None}
        # A role's own length of the warm-up replaces the other form of it.
        if "lr_warmup_iters" in given or "lr_warmup_fraction" in given:
            given = {"lr_warmup_iters": 0, "lr_warmup_fraction": None, **given}
        return train.model_copy(update=given)


class TrainConfig(OptimizerKeys):
    """How a rollout batch is trained on."""

    optimizer: PluginTable = PluginTable(name="adam")
    """Optimizer: its name, with its options beside it."""

    num_rollout: int | None = Field(None, ge=0)
    """Rollout steps of the run. 0: evaluate only. Give this or num_epoch."""
    num_epoch: int | None = Field(None, gt=0)
    """Passes over the data; num_rollout = num_epoch x rows // rollout_batch_size."""
    global_batch_size: int | None = Field(None, gt=0)
    """Rollouts (trajectories) per optimizer step."""
    num_steps_per_rollout: int | None = Field(None, gt=0)
    """Optimizer steps per rollout batch: rollout_batch_size x n_samples_per_prompt = global_batch_size x this."""
    use_dynamic_batch_size: bool = True
    """Pack micro-batches up to max_tokens_per_gpu; off: micro_batch_size samples each."""
    max_tokens_per_gpu: int = Field(8192, gt=0)
    """Tokens in one packed micro-batch, per context-parallel rank."""
    log_probs_max_tokens_per_gpu: int | None = Field(None, gt=0)
    """The same for forwards without gradient; by default max_tokens_per_gpu."""
    micro_batch_size: int = Field(1, gt=0)
    """Samples in a micro-batch when use_dynamic_batch_size is off."""
    balance_data: bool = True
    """Samples are distributed so that data-parallel ranks have equal work in each micro-batch, in estimated FLOPs, and nowhere
    wait for each other; off: packed in order, and dealt to the ranks in turn."""
    use_routing_replay: bool = False
    """Training uses the experts that the forward of the old log-probs chose (routing replay, R2)."""
    use_rollout_routing_replay: bool = False
    """Training, and the forward of the old log-probs, use the experts that the engine chose (rollout routing replay, R3);
    includes use_routing_replay."""
    max_skipped_steps: int = Field(3, ge=0)
    """Non-finite optimizer steps in a row that are skipped; one more and the run fails."""
    rank_call_timeout: float = Field(14_400.0, gt=0)
    """Seconds that a call to a trainer's ranks may take, such as all optimizer steps of a batch with their compilation, before
    they count as hung and the run ends."""
    on_nonfinite: Literal["error", "skip"] = "error"
    """A sample whose log-probs or values are not finite: the run stops with its name, or the sample is left out of the
    batch (counted: rollout/nonfinite_samples)."""
    on_short_batch: Literal["error", "train"] = "error"
    """When failures leave fewer rollouts than a step needs: the run stops (error), or the step trains on them (train)."""
    ref_update_interval: int | None = Field(None, gt=0)
    """Rollout steps between two copies of the actor over the reference."""
    load_debug_train_data: RunPath | None = None
    """Folder of train data (train_data/ of a run with save_debug_train_data): its steps are trained on again with the
    recorded scores and advantages; nothing is generated."""
    debug_train_only: bool = False
    """No engine is started and nothing is evaluated: steps come from load_debug_rollout_data or load_debug_train_data."""

    def optimizer_config(self) -> OptimizerConfig:
        keys = {name: getattr(self, name) for name in OptimizerKeys.model_fields}
        return OptimizerConfig(optimizer=self.optimizer.name, **keys)
