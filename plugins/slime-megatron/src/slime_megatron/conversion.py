"""Converts model folders to Megatron's torch_dist and back, a layer at a time, without building the model in memory.

A torch_dist checkpoint knows whole tensors and where each part of them lies, not who had which: it can be loaded under any
layout, so converting between layouts is loading.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from slime_core.contracts.converter import Checksums, Converter, Shard
from slime_core.errors import CheckpointError, ModelError
from slime_megatron.bridges.bridge import LAYER, PREDICTION
from slime_megatron.bridges.weight import Stacks
from slime_megatron.checkpoint import MANIFEST, PlainSave
from slime_megatron.config import MegatronConfig
from slime_megatron.cpu import use_cpu
from slime_megatron.folder import ModelFolder, open_folder
from slime_megatron.layout import ParallelDims
from slime_megatron.model import PackedGpt
from slime_megatron.model_chunks import Placement, build_chunks, make_config
from slime_megatron.torch_dist_folder import (
    NoCommon,
    differences,
    parts_of_tensors,
    read_metadata,
    renamed,
    shapes_in,
    stacks,
)
from slime_megatron.torch_dist_place import METADATA, NEWEST, STATE, torch_dist_place
from slime_megatron.transformer_engine import patch_missing_transformer_engine
from slime_training.listed_names import listed
from slime_training.process_group import make_single_group
from slime_training.weight_files import checksum_of, copy_small_files, file_of, gather_weights

OUTER: Final = "outer"
"""The piece with embedding, last norm and head."""
TOWERS: Final = "towers"
"""The piece with the tensors of other models than the decoder, which are copied from the Hugging Face folder."""
HF: Final = "hf"
"""Folder in a torch_dist checkpoint that slime wrote: config and tokenizer, no weights."""
WEIGHTS: Final = "model.safetensors"
OF_A_MODEL: Final = ("decoder.", "embedding.", "output_layer.", "value_head.")
"""Prefixes of the keys of its tensors."""


def piece_of(name: str) -> str:
    """The piece of a parameter, by its name in the whole model."""
    if found := PREDICTION.match(name):
        return f"prediction_{found[1]}"
    found = LAYER.match(name)
    return f"layer_{found[1]}" if found else OUTER


class WholeModel:
    """The model on one rank, without memory for its weights."""

    def __init__(self, folder: ModelFolder, num_ahead: int, *, stacks: bool = True) -> None:
        """`num_ahead`: layers of multi-token prediction. `stacks`: equal layers are
        parts of one tensor, which is Megatron's default."""
        if not dist.is_initialized():
            make_single_group()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        use_cpu()
        patch_missing_transformer_engine()
        self.folder = folder
        architecture = folder.bridge.architecture()
        placement = Placement(device=torch.device("meta"), dtype=folder.dtype)
        # Experts are separate parameters, under the names that bridges use; the files are the same for grouped ones.
        options = MegatronConfig(mtp_num_layers=num_ahead, moe_grouped_gemm=False)
        config = make_config(architecture, options, ParallelDims(), placement)
        with torch.device("meta"):
            (model,) = build_chunks(config, architecture, options, ParallelDims(), placement, head="lm")
        assert isinstance(model, PackedGpt)
        metadata = None if stacks else {"non_homogeneous_layers": True}
        self._state: Mapping[str, Any] = model.sharded_state_dict(metadata=metadata)
        self.shapes = {
            name: tuple(tensor.shape)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if name in self._state and isinstance(self._state[name], ShardedTensor | ShardedTensorFactory)
        }
        self.float32 = {name for name, tensor in model.named_buffers() if tensor.dtype == torch.float32}

    def names(self, piece: Shard) -> list[str]:
        return [name for name in self.shapes if piece_of(name) == piece.name]

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self.float32 else self.folder.dtype

    def sharded(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The tensors in the form that Megatron saves or loads."""
        return {name: with_data(self._state[name], tensor) for name, tensor in tensors.items()}

    def objects(self, piece: Shard) -> dict[str, Any]:
        """The extra states of Megatron's modules: they are empty, but Megatron requires them when it loads."""
        return {
            name: entry
            for name, entry in self._state.items()
            if isinstance(entry, ShardedObject) and piece_of(name) == piece.name
        }

    def check(self, state: Path, vocab_size: int | None) -> None:
        """Raises CheckpointError with the differences unless the tensors of a torch_dist folder are this model's. `vocab_size`:
        of the model that was saved; None: not known."""
        there = shapes_in(read_metadata(state))
        empty = {name: torch.empty(self.shapes[name], dtype=self.dtype_of(name), device="meta") for name in self.shapes}
        sharded = self.sharded(empty)
        renamed(sharded, there)
        here = parts_of_tensors(sharded)
        problems = []
        ours = self.folder.bridge.architecture().vocab_size
        if vocab_size not in (None, ours):
            problems.append(f"its vocabulary is {vocab_size} there and {ours} in that config")
        problems += differences(there, here)
        if extra := sorted(key for key in there.keys() - here.keys() if key.startswith(OF_A_MODEL)):
            problems.append(f"the model has no place for {len(extra)} tensors: {listed(extra)}")
        if problems:
            raise CheckpointError(
                f"{state}: it does not belong to the model of {self.folder.path}/config.json: {'; '.join(problems)}."
            )

    def read(self, state: Path, piece: Shard) -> dict[str, Tensor]:
        """Reads a piece from a torch_dist folder."""
        empty = {name: torch.empty(self.shapes[name], dtype=self.dtype_of(name)) for name in self.names(piece)}
        sharded = self.sharded(empty)
        renamed(sharded, shapes_in(read_metadata(state)))
        try:
            loaded: dict[str, Any] = dist_checkpointing.load(
                sharded,
                str(state),
                sharded_strategy=PieceLoad(),
                common_strategy=NoCommon(),
                validate_access_integrity=False,
            )
        except (
            CheckpointException, dist_checkpointing.core.CheckpointingException, KeyError, ValueError, RuntimeError
        ) as error:  # fmt: skip
            raise CheckpointError(
                f"{state}: {piece.name} of the model in {self.folder.path} is missing: {error}"
            ) from error
        return {name: loaded[name] for name in empty}


class PieceSave(PlainSave):
    """Saves some layers of the stack of equal layers: Megatron's own requires all of them from some rank."""

    def to_write(self, state: dict[str, list[Any]]) -> dict[str, Any]:
        return super().to_write({key: [unstacked(part) for part in parts] for key, parts in state.items()})


class PieceLoad(TorchDistLoadShardedStrategy):
    """Loads some layers into the given tensors."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        super().load(dict_list_map_outplace(unstacked, sharded_state_dict), checkpoint_dir)
        given: dict[str, Any] = dict_list_map_outplace(lambda part: part.data, sharded_state_dict)
        return given


def unstacked(part: Any) -> Any:
    """Returns the same shard of the same whole tensor, with the axes that its data does not have."""
    if not isinstance(part, ShardedTensor) or not part.prepend_axis_num:
        return part
    ones = (1,) * part.prepend_axis_num
    data = part.data.detach().reshape(ones + part.local_shape)
    return replace(part, data=data, local_shape=tuple(data.shape), prepend_axis_num=0)


def with_data(entry: Any, tensor: Tensor) -> Any:
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, data=tensor)
    return replace(entry, data=tensor, dtype=tensor.dtype)


class MegatronConverter(Converter):
    """Code of both directions."""

    def __init__(self) -> None:
        self._models: dict[Path, WholeModel] = {}

    @abstractmethod
    def folder(self, source: Path) -> ModelFolder:
        """Config and bridge of the source."""

    @abstractmethod
    def num_ahead(self, source: Path) -> int:
        """Layers of multi-token prediction that exist and can be converted."""

    def stacks(self, source: Path) -> bool:
        """Whether equal layers are parts of one tensor."""
        return True

    def model(self, source: Path) -> WholeModel:
        if source not in self._models:
            self._models[source] = WholeModel(self.folder(source), self.num_ahead(source), stacks=self.stacks(source))
        return self._models[source]

    def pieces_of(self, source: Path, num_bytes: int) -> list[Shard]:
        layers = int(self.folder(source).bridge.config.num_hidden_layers)
        names = [OUTER, *(f"layer_{layer}" for layer in range(layers))]
        names += [f"prediction_{number}" for number in range(self.num_ahead(source))]
        return [Shard(name=name, num_bytes=num_bytes // len(names)) for name in names]


class ToTorchDist(MegatronConverter):
    """Hugging Face to torch_dist."""

    def folder(self, source: Path) -> ModelFolder:
        return open_folder(source)

    def num_ahead(self, source: Path) -> int:
        folder = self.folder(source)
        bridge = folder.bridge
        names = [name for weight in bridge.prediction_weights().values() for name in weight.names]
        count = 0
        while count < bridge.most_predictions and names:
            prefix, _ = bridge.prediction_prefixes(count)
            if not all(prefix + name in folder.files for name in names):
                break
            count += 1
        return count

    def pieces(self, source: Path) -> Sequence[Shard]:
        model = self.model(source)
        weights = {name: model.folder.bridge.weight(name) for name in model.shapes}
        model.folder.check(
            {k: v for name, weight in weights.items() for k, v in weight.shapes(model.shapes[name]).items()}
        )
        return self.pieces_of(source, sum(file.stat().st_size for file in set(model.folder.files.values())))

    def write(self, source: Path, piece: Shard, folder: Path) -> Checksums:
        model = self.model(source)
        bridge = model.folder.bridge
        tensors = {}
        for name in model.names(piece):
            weight = bridge.weight(name)
            whole = weight.join(model.folder.read(weight.names, weight.slot))
            tensors[name] = whole.to(model.dtype_of(name))
        dist_checkpointing.save(
            model.sharded(tensors) | model.objects(piece),
            str(folder),
            sharded_strategy=PieceSave(),
            validate_access_integrity=False,
        )
        return {name: checksum_of(tensor) for name, tensor in tensors.items()}

    def finish(self, source: Path, folders: Mapping[str, Path], target: Path) -> None:
        parts = []
        for number, folder in enumerate(folders.values()):
            found = read_metadata(folder)
            moved = {}
            for file in sorted({info.relative_path for info in found.storage_data.values()}):
                moved[file] = f"__{number}_{file.rpartition('_')[2]}"
                if (folder / file).exists():
                    (folder / file).rename(target / moved[file])
            storage = {
                index: replace(info, relative_path=moved[info.relative_path])
                for index, info in found.storage_data.items()
            }
            parts.append(replace(found, storage_data=storage))
            for name in ("common.pt", "metadata.json"):
                shutil.copyfile(folder / name, target / name)
        with (target / ".metadata").open("wb") as file:
            pickle.dump(joined(parts), file)
        copy_small_files(source, target / HF)

    def read_back(self, source: Path, piece: Shard, target: Path) -> Checksums:
        return {name: checksum_of(tensor) for name, tensor in self.model(source).read(target, piece).items()}


def joined(parts: Sequence[Metadata]) -> Metadata:
    """Joins the metadata: layers of one kind are parts of one tensor, each in a file of its own."""
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for part in parts:
        for key, entry in part.state_dict_metadata.items():
            if key in entries and isinstance(entry, TensorStorageMetadata):
                entry = replace(entry, chunks=[*entries[key].chunks, *entry.chunks])
            entries[key] = entry
        storage |= part.storage_data
    return replace(parts[0], state_dict_metadata=entries, storage_data=storage, planner_data=None)


class FromTorchDist(MegatronConverter):
    """torch_dist, alone or as the state of a training checkpoint, to Hugging Face."""

    def __init__(self, hf_checkpoint: Path | None) -> None:
        super().__init__()
        self._given = hf_checkpoint

    def state(self, source: Path) -> Path:
        found = torch_dist_place(source)
        if found is None:
            raise CheckpointError(
                f"{source}: no torch_dist checkpoint there, nor in its folder {STATE}/ (no {METADATA}), nor a {NEWEST}."
            )
        return found

    def keys(self, source: Path) -> list[str]:
        return list(read_metadata(self.state(source)).state_dict_metadata)

    def num_ahead(self, source: Path) -> int:
        return len({found[1] for key in self.keys(source) if (found := PREDICTION.match(key))})

    def stacks(self, source: Path) -> bool:
        return stacks(self.keys(source))

    def folder(self, source: Path) -> ModelFolder:
        place = self._given or self.state(source) / HF
        if not place.is_dir():
            raise ModelError(
                f"{source}: it has no config of the model. Pass --hf-checkpoint FOLDER for the Hugging Face folder that "
                "it was trained from."
            )
        return open_folder(place, weights=self._given is not None)

    def pieces(self, source: Path) -> Sequence[Shard]:
        state = self.state(source)
        folder = self.folder(source)
        if self._given is None and "text_config" in folder.raw:
            raise ModelError(
                f"{source}: it has the decoder alone of a model with a vision tower. Pass --hf-checkpoint FOLDER for the "
                "Hugging Face folder that has the tower."
            )
        manifest = source / MANIFEST
        vocab_size = json.loads(manifest.read_text())["shapes"]["vocab_size"] if manifest.is_file() else None
        self.model(source).check(state, vocab_size)
        pieces = self.pieces_of(source, sum(file.stat().st_size for file in state.glob("*.distcp")))
        towers = sum(math.prod(folder.shapes[name]) * folder.dtypes[name].itemsize for name in self.of_towers(source))
        return [*pieces, *([Shard(name=TOWERS, num_bytes=towers)] if towers else [])]

    def of_towers(self, source: Path) -> list[str]:
        folder = self.folder(source)
        return sorted(name for name in folder.files if name.startswith(folder.bridge.towers))

    def write(self, source: Path, piece: Shard, folder: Path) -> Checksums:
        model = self.model(source)
        made: dict[str, Tensor] = {}
        stacks = Stacks()
        if piece.name == TOWERS:
            names = self.of_towers(source)
            made = dict(zip(names, model.folder.read(names), strict=True))
        else:
            for name, whole in model.read(self.state(source), piece).items():
                made |= stacks.add(model.folder.bridge.weight(name), whole)
        made = {name: tensor.contiguous().clone() for name, tensor in made.items()}
        save_file(made, folder / WEIGHTS, metadata={"format": "pt"})
        return {name: checksum_of(tensor) for name, tensor in made.items()}

    def finish(self, source: Path, folders: Mapping[str, Path], target: Path) -> None:
        gather_weights([folder / WEIGHTS for folder in folders.values()], target)
        copy_small_files(self.folder(source).path, target)

    def read_back(self, source: Path, piece: Shard, target: Path) -> Checksums:
        model = self.model(source)
        files = file_of(target)
        names = {hf for name in model.names(piece) for hf in model.folder.bridge.weight(name).names}
        if piece.name == TOWERS:
            names.update(self.of_towers(source))
        found = {}
        for name in names:
            with safe_open(files[name], framework="pt") as opened:
                found[name] = checksum_of(opened.get_tensor(name))
        return found
