"""A rank's part of a training checkpoint: torch.distributed.checkpoint in safetensors files, so nothing is unpickled.

The folder holds `state/` (weights, optimizer, refreshed copies; any number of ranks can read it), `rng_R.safetensors`
for each rank R, and `fsdp.json`, written last: the steps done, the shape of every tensor and the size of every file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime_core.errors import CheckpointError
from slime_fsdp.process import Ranks
from slime_training.checkpoint_manifest import Manifest
from slime_training.collective_errors import first_failure_alone, raise_on_all_ranks
from slime_training.random_state import restore_random_state
from slime_training.written_files import check_sizes, sizes_of

MANIFEST = "fsdp.json"
STATE = "state"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state that a rank saves, at one instant."""

    tensors: Mapping[str, Tensor]
    """DTensors, or whole tensors on a single rank."""
    random: Mapping[str, Tensor]
    steps_done: int
    frozen_models: Sequence[str]


def write(folder: Path, snapshot: Snapshot, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
    """All ranks call it; `group`: a group of all of them."""
    rank = 0 if ranks.mesh is None else ranks.mesh.get_rank()
    world_size = 1 if ranks.mesh is None else ranks.mesh.size()
    writer = HuggingFaceStorageWriter(str(folder / STATE), save_distributed=True)
    with single_process_is_meant(), first_failure_alone():
        dcp.save(dict(snapshot.tensors), storage_writer=writer, process_group=group, no_dist=ranks.mesh is None)
    own = folder / f"rng_{rank}.safetensors"
    raise_on_all_ranks(lambda: save_file(dict(snapshot.random), own), group, world_size)
    raise_on_all_ranks(lambda: write_manifest(folder, snapshot, world_size) if rank == 0 else None, group, world_size)


def write_manifest(folder: Path, snapshot: Snapshot, world_size: int) -> None:
    files = [file for file in sorted(folder.glob(f"{STATE}/*")) if file.is_file()]
    files += [folder / f"rng_{r}.safetensors" for r in range(world_size)]
    manifest = Manifest(
        format=FORMAT,
        steps_done=snapshot.steps_done,
        world_size=world_size,
        copies=list(snapshot.frozen_models),
        shapes={name: list(tensor.shape) for name, tensor in snapshot.tensors.items()},
        sizes=sizes_of(folder, files),
    )
    manifest.write(folder / MANIFEST)


@contextmanager
def single_process_is_meant() -> Iterator[None]:
    """Silences torch's warning about no_dist, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError with the file's name unless all that `write` has written exists and is complete."""
    manifest = Manifest.read(folder / MANIFEST, backend="fsdp", expected_format=FORMAT)
    check_sizes(folder, manifest.sizes)
    return manifest


def read(folder: Path, manifest: Manifest, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Loads into `tensors`, in place, and into this rank's random generators. All ranks call it."""
    check_shapes(folder, manifest, tensors)
    reader = HuggingFaceStorageReader(str(folder / STATE))
    with single_process_is_meant(), first_failure_alone():
        dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.group, no_dist=ranks.mesh is None)
    rank = 0 if ranks.mesh is None else ranks.mesh.get_rank()
    if manifest.world_size == (1 if ranks.mesh is None else ranks.mesh.size()):
        restore_random_state(load_file(folder / f"rng_{rank}.safetensors"))


def shapes_and_dtypes(folder: Path) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Shapes and dtypes of all tensors of a checkpoint, by name."""
    stored = HuggingFaceStorageReader(str(folder / STATE)).read_metadata().state_dict_metadata
    return {
        name: (tensor.size, tensor.properties.dtype)
        for name, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


def check_shapes(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    requested = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(requested.keys() | manifest.shapes.keys()):
        here, there = requested.get(name), manifest.shapes.get(name)
        if here is None or there is None or here != list(there):
            raise CheckpointError(
                f"{folder / MANIFEST}: {name} is {there or 'absent'} in the checkpoint and {here or 'absent'} in this "
                "run: another model, optimizer or list of trained parameters."
            )
