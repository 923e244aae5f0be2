"""Training checkpoints: Megatron's torch_dist, which any layout can load, with a manifest that marks a checkpoint as complete.

The folder holds `state/` (weights, optimizer), `copy_NAME/` for each frozen copy that was refreshed, `rng_R.safetensors` for
each rank R, and `megatron.json`, written last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_core.errors import CheckpointError
from slime_megatron.frozen_models import FrozenModels
from slime_megatron.offload import fill_offloaded, refresh_copies
from slime_megatron.optimizer import parts_of
from slime_megatron.torch_dist_place import STATE
from slime_training.checkpoint_manifest import Manifest
from slime_training.collective_errors import first_failure_alone, raise_on_all_ranks
from slime_training.host_memory import HostCopy
from slime_training.random_state import random_state, restore_random_state
from slime_training.rounded_adamw import StochasticRoundingAdamW
from slime_training.written_files import check_sizes, sizes_of

MANIFEST = "megatron.json"
GRAD_SCALER = "grad_scaler"
DTYPE = "dtype"
"""Key among the shapes: the compute dtype."""
BF16 = {"torch.float32": "false", "torch.bfloat16": "true"}
"""Compute dtype to value of the option bf16. If the option is not set, the device chooses the dtype."""
MAIN_WEIGHTS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""Prefixes of the keys of float32 weights: of the distributed optimizer, and of the plain one in half precision."""
FORMAT = 1
Write = Callable[[dist.ProcessGroup | None], None]
"""Writes what is left to write. Its argument is a process group of all ranks; None: the default one."""
ONE = torch.tensor(1.0)
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Through gloo and host memory: the other implementation requires CUDA.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    # Experts that are sharded over other ranks have an optimizer of their own: the names are the same in every layout.
    "chained_optim_avoid_prefix": True,
}


class PlainSave(TorchDistSaveShardedStrategy):
    """Writes in this process: Megatron's own writer starts a server and forks writers, for asynchronous saving."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: of the ranks that wait for each other; None: the default one."""
        super().__init__("torch_dist", 1)
        self._group = group

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        self.planned(sharded_state_dict, Path(checkpoint_dir))(self._group)

    def planned(self, sharded_state_dict: dict[str, Any], folder: Path) -> Write:
        """Plans and returns this rank's write."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        return partial(write_planned, self.to_write(state), planner, folder)

    def to_write(self, state: dict[str, list[Any]]) -> dict[str, Any]:
        return mcore_to_pyt_state_dict(state, False)


class StagedSave(PlainSave):
    """Copies the state to host memory, and leaves writing for later."""

    def __init__(self, memory: dict[str, HostCopy], device: torch.device, *, trains_on_host: bool) -> None:
        """`memory`: one copy per folder of a checkpoint, kept from one save to the next. `device`: the model's.
        `trains_on_host`: if False, tensors on the host were gathered for this save and need no copy."""
        super().__init__()
        self.left: list[Write] = []
        self._memory = memory
        self._device = device
        self._trains_on_host = trains_on_host
        self._folder = ""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        self._folder = Path(checkpoint_dir).name
        self.left.append(self.planned(sharded_state_dict, Path(checkpoint_dir)))

    def to_write(self, state: dict[str, list[Any]]) -> dict[str, Any]:
        moved = {
            f"{key} {number}": part
            for key, parts in state.items()
            for number, part in enumerate(parts)
            if isinstance(part, ShardedTensor) and (self._trains_on_host or part.data.is_cuda)
        }
        memory = self._memory.setdefault(self._folder, HostCopy(self._device))
        values = memory.of({place: part.data for place, part in moved.items()})
        for place, part in moved.items():
            part.data = values[place]
        return super().to_write(state)


def write_planned(
    state: dict[str, Any], planner: MCoreSavePlanner, folder: Path, group: dist.ProcessGroup | None
) -> None:
    with first_failure_alone():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=planner, process_group=group)


def model_state(chunks: Sequence[Any]) -> dict[str, Any]:
    key = "model" if len(chunks) == 1 else "model{}"
    return {key.format(number): chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def whole_state(chunks: Sequence[Any], optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    model = model_state(chunks)
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=SHARDING)
    keep_here(state)
    return {**model, "optimizer": state}


def keep_here(state: Any) -> None:
    """Excludes rates, counts and groups from the files: rates and counts come from the run, and groups are made for each
    layout."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if key in ("param_groups", "common_step"):
            state[key] = LocalNonpersistentObject(unwrapped(value))
        else:
            keep_here(value)


def unwrapped(value: Any) -> Any:
    """Removes Megatron's own marks of the same kind inside `value`, since they cannot be nested."""
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    if isinstance(value, list):
        return [unwrapped(inner) for inner in value]
    return {key: unwrapped(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def make_state(optimizer: MegatronOptimizer) -> None:
    """Creates the optimizer's state. Megatron saves the state that steps have created and loads what its own function creates:
    here both are the same. It supports optimizers that count steps once for all parameters; torch's AdamW has a count in each
    parameter's state. So counts are saved as 1 (0 would be left out), and set afterwards."""
    for part in parts_of(optimizer):
        if not counts_by_group(part):
            part.init_state_fn = fill_state
        # With use_precision_aware_optimizer Megatron creates the state when it loads: its function does not fit every
        # FusedAdam.
        if part.optimizer is not None and not part.config.use_precision_aware_optimizer:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part, DistributedOptimizer) and isinstance(
            part.optimizer, (torch.optim.Adam, HybridDeviceOptimizer)
        ):
            # Megatron loads every entry of a state, and saves all but the count.
            part._set_main_param_and_optimizer_states = with_count(part._set_main_param_and_optimizer_states)
    count_steps(optimizer, 1)


def with_count(put_state: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda parameter, state: put_state(parameter, {**state, "step": ONE})


def counts_by_group(part: Any) -> bool:
    """Whether the optimizer is the FusedAdam of Transformer Engine or Apex, which Megatron uses if one of them is installed."""
    plain = isinstance(part.optimizer, (torch.optim.Adam, HybridDeviceOptimizer))
    return part.optimizer is not None and part.config.optimizer == "adam" and not plain


def count_steps(optimizer: MegatronOptimizer, steps_done: int) -> None:
    for part in parts_of(optimizer):
        if counts_by_group(part):
            for group in part.optimizer.param_groups:
                group["step"] = steps_done
        if isinstance(part.optimizer, (torch.optim.Adam, HybridDeviceOptimizer)):
            for state in part.optimizer.state.values():
                state["step"] = torch.full_like(state["step"], float(steps_done))


@torch.no_grad()
def fill_state(optimizer: Any, config: Any = None) -> None:
    if isinstance(optimizer, HybridDeviceOptimizer):
        fill_offloaded(optimizer)
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                if isinstance(optimizer, StochasticRoundingAdamW):
                    optimizer.state_of(parameter)["step"] = ONE.clone()
                    continue
                state["step"] = ONE.to(parameter.device, copy=True)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def write(
    folder: Path,
    chunks: Sequence[Any],
    optimizer: MegatronOptimizer,
    frozen_models: FrozenModels,
    *,
    refreshed: Sequence[str],
    steps_done: int,
    shapes: Mapping[str, Any],
    strategy: PlainSave,
) -> Write:
    """Returns a function that finishes the save. All ranks call this function, and then the returned one with a process group
    of all of them. Large tensors are written now, or in the second call if the strategy stages them."""
    make_state(optimizer)
    save_state(folder / STATE, whole_state(chunks, optimizer, is_loading=False), strategy)
    count_steps(optimizer, steps_done)
    for name in refreshed:
        with frozen_models.swapped_in(name):
            save_state(folder / f"copy_{name}", model_state(chunks), strategy)
    manifest = Manifest(
        format=FORMAT,
        steps_done=steps_done,
        world_size=dist.get_world_size(),
        copies=list(refreshed),
        shapes=dict(shapes),
        sizes={},
    )
    left = strategy.left if isinstance(strategy, StagedSave) else []
    return partial(finish, folder, tuple(left), random_state(), manifest)


def finish(
    folder: Path,
    left: Sequence[Write],
    random: Mapping[str, Tensor],
    manifest: Manifest,
    group: dist.ProcessGroup | None,
) -> None:
    rank, world_size = dist.get_rank(), manifest.world_size
    for write_rest in left:
        write_rest(group)
    raise_on_all_ranks(lambda: save_file(dict(random), folder / f"rng_{rank}.safetensors"), group, world_size)
    raise_on_all_ranks(lambda: write_manifest(folder, manifest) if rank == 0 else None, group, world_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    sizes = sizes_of(folder, [file for file in sorted(folder.rglob("*")) if file.is_file()])
    replace(manifest, sizes=sizes).write(folder / MANIFEST)


def save_state(folder: Path, state: dict[str, Any], strategy: PlainSave) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)


def read_manifest(folder: Path, shapes: Mapping[str, Any], table: str) -> Manifest:
    """Raises CheckpointError with the file's name unless all that `write` has written exists, is complete, and is of this
    model. `table`: the table of the options in the run file."""
    path = folder / MANIFEST
    manifest = Manifest.read(path, backend="megatron", expected_format=FORMAT)
    here = json.loads(json.dumps(dict(shapes)))
    if different := sorted(
        key for key in here.keys() | manifest.shapes.keys() if here.get(key) != manifest.shapes.get(key)
    ):
        there = manifest.shapes.get(DTYPE)
        if different == [DTYPE] and {there, here[DTYPE]} == BF16.keys():
            raise CheckpointError(
                f"{path}: this run was computed in {there}, and is computed in {here[DTYPE]} here. If {table}.bf16 is not set, "
                "GPUs compute in bfloat16 and a CPU in float32. To keep the dtype of the checkpoint, pass --resume with "
                f"the run's folder, and --{table}.bf16 {BF16[there]}."
            )
        differences = "; ".join(
            f"{key} is {manifest.shapes.get(key)} there and {here.get(key)} here" for key in different
        )
        raise CheckpointError(f"{path}: another architecture or optimizer: {differences}.")
    check_sizes(folder, manifest.sizes)
    return manifest


def read(
    folder: Path,
    manifest: Manifest,
    chunks: Sequence[Any],
    optimizer: MegatronOptimizer,
    frozen_models: FrozenModels,
) -> None:
    """Loads into the model, the optimizer, the refreshed copies and this rank's random generators. All ranks call it."""
    make_state(optimizer)
    loaded = load_state(folder / STATE, whole_state(chunks, optimizer, is_loading=True))
    put_model(chunks, loaded)
    optimizer.load_state_dict(without_grad_scaler(loaded["optimizer"]))
    scale = next(grad_scalers(loaded["optimizer"]), None)
    for part in parts_of(optimizer):
        if scale:
            load_scale(part.grad_scaler, scale)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            refresh_copies(part.optimizer)
    count_steps(optimizer, manifest.steps_done)
    with frozen_models.aside() if manifest.copies else nullcontext():
        for name in manifest.copies:
            put_model(chunks, dist_checkpointing.load(model_state(chunks), str(folder / f"copy_{name}")))
            frozen_models.take(name)
    if manifest.world_size == dist.get_world_size():
        restore_random_state(load_file(folder / f"rng_{dist.get_rank()}.safetensors"))


class OwnCommon(TorchCommonLoadStrategy):
    """Beside tensors Megatron saves how the optimizer was sharded, which belongs to the layout that saved: here the current
    layout's is used. Only the loss scale is loaded."""

    def __init__(self, optimizer: Mapping[str, Any]) -> None:
        self._optimizer = optimizer

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        common: dict[str, Any] = super().load_common(checkpoint_dir)
        scaler = next(grad_scalers(common.get("optimizer")), None)
        return common | {"optimizer": with_grad_scaler(self._optimizer, scaler)}


def grad_scalers(state: Any) -> Iterator[Any]:
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == GRAD_SCALER:
            yield value
        else:
            yield from grad_scalers(value)


def with_grad_scaler(state: Any, scaler: Any) -> Any:
    """Returns a copy with the state of `scaler`."""
    if not isinstance(state, Mapping):
        return state
    return {
        key: scaler if key == GRAD_SCALER and scaler is not None else with_grad_scaler(value, scaler)
        for key, value in state.items()
    }


def without_grad_scaler(state: Any) -> Any:
    """Returns a copy without the loss scale."""
    if not isinstance(state, Mapping):
        return state
    return {key: without_grad_scaler(value) for key, value in state.items() if key != GRAD_SCALER}


def load_scale(scaler: Any, state: Mapping[str, Any]) -> None:
    """Loads a dynamic loss scale onto the device of the optimizer. Megatron's own function requires a GPU."""
    scaler._scale = state["scale"].to(scaler._scale.device)
    scaler._growth_tracker = state["growth_tracker"]
    scaler._hysteresis_tracker = state["hysteresis_tracker"]


def load_state(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Loads a state that any layout saved, with the distributed or the plain optimizer. Moments have the same names in all;
    float32 weights have another name in each, and none if the model's own are float32."""
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    there = next((prefix for prefix in MAIN_WEIGHTS if any(key.startswith(prefix) for key in keys)), "")
    mains, others = extract_matching_values(state["optimizer"], is_main_weight)
    for part in nested_values(mains):
        part.key = there + next(part.key.removeprefix(own) for own in MAIN_WEIGHTS if part.key.startswith(own))
    first = state if there else {**state, "optimizer": others}
    _, rest = extract_matching_values(others, lambda value: isinstance(value, ShardedBase | LocalNonpersistentObject))
    loaded: dict[str, Any] = dist_checkpointing.load(first, str(folder), common_strategy=OwnCommon(rest))
    if not there:
        # The model's own weights, which one load returns only once.
        found = dist_checkpointing.load({"optimizer": mains}, str(folder), common_strategy=OwnCommon({}))
        merge(loaded["optimizer"], found["optimizer"])
    return loaded


def is_main_weight(part: Any) -> bool:
    return isinstance(part, ShardedTensor | ShardedTensorFactory) and part.key.startswith(MAIN_WEIGHTS)


def put_model(chunks: Sequence[Any], loaded: Mapping[str, Any]) -> None:
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{number}"], strict=True)
