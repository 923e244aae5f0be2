"""The extension of vLLM's workers: importing it registers the weight transfer backend `slime`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "slime"


@dataclass
class SlimeInit(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class SlimeUpdate(WeightTransferUpdateInfo):
    """Whole tensors, concatenated: in a file of this machine's memory, or as base64."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First byte of each tensor."""
    size: int = 0
    """Bytes together."""
    path: str | None = None
    data: str | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.path is not None:
            # vLLM keeps tensors until their layer is complete, in a later call perhaps: the mapping stays as long.
            flat = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        else:
            flat = torch.frombuffer(bytearray(base64.b64decode(self.data or "")), dtype=torch.uint8)
        for name, dtype, shape, start in zip(self.names, self.dtypes, self.shapes, self.starts, strict=True):
            kind = getattr(torch, dtype)
            length = kind.itemsize * torch.Size(shape).numel()
            yield name, flat[start : start + length].view(kind).reshape(shape)


class SlimeWeights(WeightTransferEngine[SlimeInit, SlimeUpdate]):
    init_info_cls = SlimeInit
    update_info_cls = SlimeUpdate

    def init_transfer_engine(self, init_info: SlimeInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SlimeUpdate) -> None:
        self.model.load_weights(update_info.tensors())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SlimeWeights)


class WorkerExtension:
    """Methods of the worker for /collective_rpc; `self` is vLLM's worker."""

    def num_parameters(self) -> int:
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        return sum(parameter.numel() for parameter in model.parameters())

    def served_options(self) -> dict[str, Any]:
        """What the server was started with, as far as a run must know it."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model, parallel, transfer = config.model_config, config.parallel_config, config.weight_transfer_config
        return {
            "model": model.model,
            "logprobs_mode": model.logprobs_mode,
            "skip_tokenizer_init": model.skip_tokenizer_init,
            "ranks": parallel.world_size,
            "replicas": parallel.data_parallel_size,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "grammar_backend": config.structured_outputs_config.backend,
            "scheduling_policy": config.scheduler_config.policy,
            "weight_transfer_backend": None if transfer is None else transfer.backend,
        }
