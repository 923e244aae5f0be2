"""The driver of the entry point `fsdp`. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slime_core.contracts.backend import BackendDriver, Layout, TrainBackend
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import BackendExample, Example
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import OptimizerDriver
from slime_fsdp.config import (
    FsdpConfig,
    adapter_rank,
    layout_of,
    optimizer_problems,
    problems_of,
    true_on_policy_problems,
)
from slime_training.adapters.drivers import AdapterHolder
from slime_training.chosen_optimizer import chosen_optimizer
from slime_training.memory_plan import TrainerLoad, TrainerMemory, TrainerPlanner
from slime_training.prompt_targets import PromptTargets
from slime_training.restartable import Restartable


class Fsdp(TrainerPlanner, AdapterHolder, PromptTargets, Restartable, BackendDriver):
    """torch FSDP2 over the causal language models of transformers, on CPU (gloo) or GPU (NCCL)."""

    Config: ClassVar[type[DriverConfig]] = FsdpConfig
    provides: ClassVar[frozenset[Need]] = BackendDriver.provides | {Need.VALUES}
    supports_images: ClassVar[bool] = True
    supports_async_save: ClassVar[bool] = True
    step_settings: ClassVar[frozenset[str]] = frozenset({"lr", "betas", "eps", "weight_decay", "clip_grad"})
    layout_options: ClassVar[frozenset[str]] = frozenset(
        {
            "context_parallel_size",
            "reshard_after_forward",
            "sync_each_micro_batch",
            "fsdp_cpu_offload",
            "gradient_checkpointing",
            "log_probs_chunk_size",
            "compile",
        }
    )

    @classmethod
    def build(cls, config: FsdpConfig) -> TrainBackend:
        from slime_fsdp.backend import FsdpBackend

        return FsdpBackend(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [BackendExample(options={"context_parallel_size": 2}, world_size=2)]

    @classmethod
    def min_world_size(cls, config: FsdpConfig) -> int:
        return config.context_parallel_size

    @classmethod
    def layout(cls, config: FsdpConfig, rank: int, world_size: int) -> Layout:
        return layout_of(config, rank, world_size)

    @classmethod
    def memory(cls, config: FsdpConfig, load: TrainerLoad) -> TrainerMemory:
        from slime_fsdp.memory import memory_of

        return memory_of(config, load)

    @classmethod
    def memory_savers(cls, config: FsdpConfig, load: TrainerLoad) -> Sequence[Mapping[str, Any]]:
        anywhere: list[Mapping[str, Any]] = [{"gradient_checkpointing": True}, {"log_probs_chunk_size": 256}]
        if load.setup.device == "cpu":
            return anywhere
        moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        rounds = chosen_optimizer(load.setup).driver.rounds_state
        of_states = [moments, {"main_params_dtype": "bf16", **moments}] if rounds else []
        return [*anywhere, *of_states, {"compile": True}, {"fsdp_cpu_offload": True}]

    @classmethod
    def max_adapters(cls, config: FsdpConfig) -> int:
        return config.max_adapters or 0

    @classmethod
    def adapter_rank(cls, config: FsdpConfig) -> int:
        return adapter_rank(config)

    @classmethod
    def true_on_policy_problems(cls, config: FsdpConfig) -> list[str]:
        return true_on_policy_problems(config)

    @classmethod
    def optimizer_problems(cls, config: FsdpConfig, name: str, optimizer: type[OptimizerDriver]) -> list[str]:
        return optimizer_problems(config, name, optimizer)

    @classmethod
    def problems(cls, config: FsdpConfig, world_size: int, model_config: Mapping[str, Any]) -> list[str]:
        return problems_of(config, world_size, model_config)
