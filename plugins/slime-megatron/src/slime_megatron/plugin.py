"""The driver of the entry point `megatron`. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from slime_core.contracts.backend import BackendDriver, Layout, TrainBackend
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import BackendExample, Example
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.contracts.setup import RoutingReplay
from slime_megatron.config import MegatronConfig, MegatronOptions, layout_of, options_without_effect, problems_of
from slime_megatron.layout import ranks_of
from slime_megatron.native_optimizer import native_name, optimizer_problems
from slime_megatron.stages import Stages
from slime_megatron.torch_dist_place import torch_dist_place
from slime_training.memory_plan import TrainerLoad, TrainerMemory, TrainerPlanner


class Megatron(TrainerPlanner, BackendDriver):
    """Megatron-core over Hugging Face folders, on GPUs (NCCL) or the CPU (gloo)."""

    Config: ClassVar[type[DriverConfig]] = MegatronConfig
    provides: ClassVar[frozenset[Need]] = BackendDriver.provides | {Need.VALUES}
    supports_async_save: ClassVar[bool] = True
    routing_replay_modes: ClassVar[frozenset[RoutingReplay]] = frozenset(RoutingReplay)
    layout_options: ClassVar[frozenset[str]] = frozenset(
        {
            "tensor_model_parallel_size",
            "sequence_parallel",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "use_distributed_optimizer",
            "moe_grouped_gemm",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            # Checked against the checkpoint (`read_manifest`): a run that moves to another device has to set it.
            "bf16",
            *(field.name for field in fields(Stages)),
        }
    )

    @classmethod
    def build(cls, config: MegatronOptions) -> TrainBackend:
        from slime_megatron.backend import MegatronBackend

        return MegatronBackend(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [
            BackendExample(options={"tensor_model_parallel_size": 2, "sequence_parallel": True}, world_size=2),
        ]

    @classmethod
    def memory(cls, config: MegatronOptions, load: TrainerLoad) -> TrainerMemory:
        from slime_megatron.memory import memory_of

        return memory_of(config, load)

    @classmethod
    def memory_savers(cls, config: MegatronOptions, load: TrainerLoad) -> Sequence[Mapping[str, Any]]:
        savers: list[Mapping[str, Any]] = [
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            {"tensor_model_parallel_size": 2 * config.tensor_model_parallel_size, "sequence_parallel": True},
            {"log_probs_chunk_size": 256},
        ]
        if load.setup.device == "cuda" and native_name(load.setup) == "adam" and not config.fp16:
            moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
            savers += [moments, {"main_params_dtype": "bf16", **moments}]
            if config.use_distributed_optimizer is not False:
                savers.append({"optimizer_cpu_offload": True})
        return savers

    @classmethod
    def reads_frozen(cls, folder: Path) -> bool:
        return torch_dist_place(folder) is not None

    @classmethod
    def min_world_size(cls, config: MegatronOptions) -> int:
        return ranks_of(config.shape)

    @classmethod
    def layout(cls, config: MegatronOptions, rank: int, world_size: int) -> Layout:
        return layout_of(config, rank, world_size)

    @classmethod
    def optimizer_problems(cls, config: MegatronOptions, name: str, optimizer: type[OptimizerDriver]) -> list[str]:
        return optimizer_problems(name, optimizer)

    @classmethod
    def notices(cls, config: MegatronOptions) -> list[str]:
        return [
            f"backend.{name} = {reason}, so it has no effect."
            for name, reason in options_without_effect(config).items()
        ]

    @classmethod
    def problems(cls, config: MegatronOptions, world_size: int, model_config: Mapping[str, Any]) -> list[str]:
        return problems_of(config, world_size, model_config)
