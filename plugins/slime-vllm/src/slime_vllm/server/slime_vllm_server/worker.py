"""The extension of vLLM's workers: importing it registers the weight transfer backend `slime`."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import envs
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from slime_vllm_server.comparison import Comparison
from slime_vllm_server.cpu_adapters import leave_rows_alone
from slime_vllm_server.folders import LoadedFolder
from slime_vllm_server.gate import wait_at_gate
from slime_vllm_server.in_place import loads_in_place
from slime_vllm_server.memory_handles import opened
from slime_vllm_server.prompt_heads import PromptHeads
from slime_vllm_server.weight_groups import broadcast, join

BACKEND: Final = "slime"
EMBEDDING: Final = "embed_tokens.weight"
HEAD: Final = "lm_head.weight"


@dataclass
class SlimeInit(WeightTransferInitInfo):
    """Joins or leaves a process group with the trainer's first rank; by default neither."""

    join: dict[str, Any] | None = None
    """`slime_transports.receiver.GroupPlace`."""
    leave: str | None = None


@dataclass
class SlimeUpdate(WeightTransferUpdateInfo):
    """Whole tensors, concatenated. Where they are is one of the last fields."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First byte of each tensor."""
    size: int = 0
    """Bytes together."""
    path: str | None = None
    """A file of this machine's memory."""
    data: str | None = None
    """Base64."""
    payloads: list[str] | None = None
    """For each worker, in the order of their ranks: see `memory_handles`."""
    group: str | None = None
    """A broadcast in this group."""
    folder: str | None = None
    """All tensors of a folder: see `folders`."""

    def tensors_in(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape, start in zip(self.names, self.dtypes, self.shapes, self.starts, strict=True):
            kind = getattr(torch, dtype)
            length = kind.itemsize * torch.Size(shape).numel()
            yield name, flat[start : start + length].view(kind).reshape(shape)


class SlimeWeights(WeightTransferEngine[SlimeInit, SlimeUpdate]):
    """vLLM loads layer by layer: a layer that has all its tensors is rearranged for its kernels and copied to where the old one
    was. So a layer with some of its tensors alone would be part new and part nothing: every update has all tensors. Where
    nothing is rearranged, they are written over the old ones (`in_place`)."""

    init_info_cls = SlimeInit
    update_info_cls = SlimeUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded = LoadedFolder()
        self._groups: dict[str, dist.Backend] = {}
        self._open = False
        self.compares = False
        """The next update is one that the model has, and is compared with it."""
        self._comparison: Comparison | None = None
        parallel = self.parallel_config
        # Of a model without experts, each replica's ranks begin at 0.
        self._rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        """Of this worker in its server, over all replicas."""
        self._in_place = loads_in_place(self.model, self.device)
        config = self.model_config.hf_config
        self._tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))

    def init_transfer_engine(self, init_info: SlimeInit) -> None:
        if init_info.join is not None:
            place = init_info.join
            self._groups[str(place["name"])] = join(place, self._rank, self.device)
        if init_info.leave is not None:
            self._groups.pop(init_info.leave)

    def start_weight_update(self) -> None:
        if self._comparison is not None:
            self._comparison.close()
            self._comparison = None
        if self._open:
            self._discard()
        if self.compares:
            self._open = False
            self._comparison = Comparison(self.model, self.model_config)
        if self.compares or self._in_place:
            return
        self._open = True
        initialize_layerwise_reload(self.model)

    def _discard(self) -> None:
        """Drops what vLLM keeps of an update that failed: it would be loaded in place of what comes now. Layers that were not
        complete hold their old values again."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: SlimeUpdate) -> None:
        if update_info.folder is not None:
            self._load(self.loaded.tensors(Path(update_info.folder)))
            return
        self.loaded.forget()
        self._load(update_info.tensors_in(self._flat(update_info)))

    def _flat(self, update: SlimeUpdate) -> Tensor:
        """(bytes,) uint8, on the host or on the device. vLLM may keep views of it until the end of the update."""
        if update.path is not None:
            return torch.from_file(update.path, shared=True, size=update.size, dtype=torch.uint8)
        if update.payloads is not None:
            kept = self._comparison is not None or not self._in_place
            return opened(update.payloads[self._rank], self.device, copies=kept)
        if update.group is not None:
            return broadcast(self._groups[update.group], update.size, self.device)
        return torch.frombuffer(bytearray(base64.b64decode(update.data or "")), dtype=torch.uint8)

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        # A bucket has a part of the tensors.
        with disable_mtp_completeness_check():
            if self._comparison is None:
                self.model.load_weights(self._with_head(named))
            else:
                self._comparison.load(self._with_head(named), self.model.load_weights)

    def _with_head(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """A tied head is in no file, but vLLM's is another parameter on a CPU, and would keep its old values."""
        for name, tensor in named:
            yield name, tensor
            if self._tied and name.endswith(EMBEDDING):
                yield HEAD, tensor

    def finish_weight_update(self) -> None:
        if self._comparison is not None:
            comparison, self._comparison = self._comparison, None
            comparison.finish()
            return
        if self._in_place:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        self._open = False

    def shutdown(self) -> None:
        self._groups.clear()


WeightTransferEngineFactory.register_engine(BACKEND, SlimeWeights)
leave_rows_alone()


class WorkerExtension:
    """Methods of the worker for /collective_rpc; `self` is vLLM's worker."""

    weight_transfer_engine: SlimeWeights
    _weight_update_active: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Waits at the gate: everything is imported, and the device is first used by `init_device`."""
        wait_at_gate()
        return super().__new__(cls)

    def begin_weight_update(self, compares: bool = False) -> None:
        """Starts an update, also after one that was not sent to its end. `compares`: nothing is loaded, but compared."""
        self.weight_transfer_engine.compares = compares
        # vLLM refuses to start one. It is discarded by `SlimeWeights.start_weight_update`.
        self._weight_update_active = False
        self.start_weight_update()  # type: ignore[attr-defined]

    def require_loadable(self, folder: str) -> None:
        """Raises ValueError with `LoadedFolder.problem`. An error, because vLLM returns what the workers of the first replica
        return, and raises what any of them raises. Empty: nothing is asked."""
        if folder and (problem := self.weight_transfer_engine.loaded.problem(Path(folder))):
            raise ValueError(problem)

    def load_adapter(self, folder: str) -> None:
        """Loads an adapter over the one that the server has, whose name and id stay. Raises ValueError if the server has none
        or several, or if a tensor of the new one belongs to no layer: vLLM would ignore it."""
        manager: Any = self.model_runner.lora_manager  # type: ignore[attr-defined]
        held = manager.list_adapters()
        if len(held) != 1:
            raise ValueError(f"this worker has {len(held)} adapters, and exactly one can be replaced")
        (number,) = held
        manager.add_adapter(LoRARequest(lora_name="replaced", lora_int_id=number, lora_path=folder, load_inplace=True))
        require_layers(manager, number)

    def newest_adapter(self) -> int:
        """The number of the adapter that was loaded last. Raises ValueError, and frees it, if a tensor of it belongs to no
        layer."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        PromptHeads.use(runner)
        manager: Any = runner.lora_manager
        number = max(manager.list_adapters())
        try:
            require_layers(manager, number)
        except ValueError:
            manager.remove_adapter(number)
            raise
        return int(number)

    def served_options(self) -> dict[str, Any]:
        """What the server was started with, as far as a run must know it."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model, transfer, lora = config.model_config, config.weight_transfer_config, config.lora_config
        return {
            "model": model.model,
            "logprobs_mode": model.logprobs_mode,
            "skip_tokenizer_init": model.skip_tokenizer_init,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "grammar_backend": config.structured_outputs_config.backend,
            "scheduling_policy": config.scheduler_config.policy,
            "weight_transfer_backend": None if transfer is None else transfer.backend,
            "max_loras": 0 if lora is None else lora.max_loras,
            "max_cpu_loras": 0 if lora is None else lora.max_cpu_loras,
            "max_logprobs": model.max_logprobs,
            "max_lora_rank": 0 if lora is None else lora.max_lora_rank,
            "loads_adapters": envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
        }


def require_layers(manager: Any, number: int) -> None:
    """Raises ValueError if a tensor of the adapter belongs to no layer: vLLM ignores it."""
    layers = manager._adapter_manager
    if unknown := sorted(layers.get_adapter(number).loras.keys() - layers.modules.keys()):
        raise ValueError(f"{len(unknown)} parts of the adapter belong to no layer of vLLM's, such as {unknown[0]}")
