"""Loads and exports weights: between a Hugging Face folder and the parameters that the ranks share.

Every parameter of the whole model has one name, whichever ranks hold it: layers and experts are counted over the whole
model. Legend: TP tensor-parallel, PP pipeline, EP expert-parallel ranks.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from slime_megatron.bridges.bridge import LAYER, PREDICTION, Bridge
from slime_megatron.bridges.weight import Stacks, Weight
from slime_megatron.experts import STACKED, expert_name
from slime_megatron.folder import ModelFolder
from slime_training.joint_gather import gather_jointly
from slime_training.saved_model import write_model
from slime_training.weight_files import copy_generation_and_code

LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
LANGUAGE_MODEL: Final = re.compile(r"For(CausalLM|ConditionalGeneration)$")
JOINT_BYTES: Final = 512 * 2**20
"""Highest number of bytes of whole tensors that one collective gathers; a single tensor may exceed it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter of one pipeline stage; plain data, the same on all ranks of the stage."""

    name: str
    """Name in the whole model; an expert's has its number on the first EP rank."""
    shape: tuple[int, ...]
    """Shape on one rank."""
    dtype: torch.dtype
    dim: int | None
    """Dimension that is sharded over TP ranks; None: replicated."""
    stage: int
    """PP rank."""
    frozen: bool = False

    @property
    def expert(self) -> int | None:
        found = LOCAL_EXPERT.search(self.name)
        return int(found[1]) if found else None

    @property
    def is_bias_of_router(self) -> bool:
        """Whether it is a router's bias, which is kept in float32."""
        return self.name.endswith("expert_bias")


def whole_name(name: str, chunk: nn.Module) -> str:
    """`decoder.layers.1.x` of a stage that starts at layer 4 is `decoder.layers.5.x`."""
    found = LAYER.match(name)
    if found is None:
        return name
    layer = chunk.decoder.layers[int(found[1])].layer_number - 1  # type: ignore[union-attr,index]
    return f"decoder.layers.{layer}.{found[2]}"


def local_tensors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and routers' biases of this rank by their names. A tied head on a stage without the embedding is named as the
    embedding."""
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        tied = chunk.share_embeddings_and_output_weights
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name.endswith("local_tokens_per_expert"):
                continue
            is_embedding = tied and name == "output_layer.weight"
            found["embedding.word_embeddings.weight" if is_embedding else whole_name(name, chunk)] = tensor
    return found


def tensor_dim(tensor: Tensor, *, stacked: bool) -> int | None:
    """`stacked`: the dimension is that of one expert in a parameter of all experts."""
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    return int(tensor.partition_dim) - stacked  # type: ignore[attr-defined]


def places_in(name: str, tensor: Tensor) -> list[tuple[str, tuple[str, int | None]]]:
    """Names of entries, with the parameter that holds each, and which of its experts it is."""
    if not STACKED.match(name):
        return [(name, (name, None))]
    return [(expert_name(name, number), (name, number)) for number in range(len(tensor))]


class WeightTable:
    """Which rank holds what; built once, by all ranks together."""

    def __init__(self, chunks: Sequence[nn.Module], bridge: Bridge, vocab_size: int) -> None:
        self._bridge = bridge
        self._vocab_size = vocab_size
        self._tensors = local_tensors(chunks)
        self._places = dict(place for name, tensor in self._tensors.items() for place in places_in(name, tensor))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        mine = [
            Entry(
                name=name,
                shape=tuple(self._tensor(name).shape),
                dtype=self._tensors[whole].dtype,
                dim=tensor_dim(self._tensors[whole], stacked=number is not None),
                stage=stage,
                frozen=not self._tensors[whole].requires_grad,
            )
            for name, (whole, number) in self._places.items()
        ]
        self._pp = parallel_state.get_pipeline_model_parallel_group()
        gathered: list[Any] = [None] * self._pp.size()
        dist.all_gather_object(gathered, mine, group=self._pp)
        entries = {entry.name: entry for part in gathered for entry in part}
        self.entries = sorted(entries.values(), key=order_of)
        self._experts_per_rank = Counter(
            LOCAL_EXPERT.sub("", entry.name) for entry in self.entries if entry.expert is not None
        )

    def _tensor(self, name: str) -> Tensor:
        """This rank's current tensor of an entry."""
        whole, number = self._places[name]
        tensor = self._tensors[whole].detach()
        return tensor if number is None else tensor[number]

    def shapes_in(self, folder: ModelFolder) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the whole model, by their names in the folder."""
        found: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            for number in self._experts(entry):
                found |= weight_of(folder.bridge, entry, number).shapes(self._whole_shape(entry))
        return found

    def _whole_shape(self, entry: Entry) -> list[int]:
        shape = self._gathered_shape(entry)
        if self._is_vocabulary(entry):
            shape[0] = self._vocab_size
        return shape

    def _gathered_shape(self, entry: Entry) -> list[int]:
        """The shape with the padding of the vocabulary."""
        shape = list(entry.shape)
        if entry.dim is not None:
            shape[entry.dim] *= self._tp(entry).size()
        return shape

    def _experts(self, entry: Entry) -> list[int | None]:
        """Numbers of the experts that EP ranks hold at this entry."""
        if entry.expert is None:
            return [None]
        per_rank = self._experts_per_rank[LOCAL_EXPERT.sub("", entry.name)]
        return [entry.expert + rank * per_rank for rank in range(parallel_state.get_expert_model_parallel_world_size())]

    def _tp(self, entry: Entry) -> dist.ProcessGroup:
        if entry.expert is not None:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @torch.no_grad()
    def load(self, folder: ModelFolder, *, fresh: Sequence[str] = ()) -> None:
        """Every rank reads its own part, under the names of this folder. `fresh`: names that may be missing in it."""
        requested = {
            name: shape for name, shape in self.shapes_in(folder).items() if name not in fresh or name in folder.files
        }
        # A value head replaces the language model's.
        folder.check(requested, unused=("lm_head.weight",) if fresh else ())
        for entry in self.entries:
            if entry.name not in self._places:
                continue
            number = self._experts(entry)[
                parallel_state.get_expert_model_parallel_rank() if entry.expert is not None else 0
            ]
            weight = weight_of(folder.bridge, entry, number)
            if any(name not in folder.files for name in weight.names):
                continue
            whole = self._padded(entry, weight.join(folder.read(weight.names, weight.slot)))
            if entry.dim is not None:
                group = self._tp(entry)
                whole = weight.shard(whole, entry.dim, group.size())[group.rank()]
            self._tensor(entry.name).copy_(whole)

    def _is_vocabulary(self, entry: Entry) -> bool:
        return entry.name in ("embedding.word_embeddings.weight", "output_layer.weight")

    def _padded(self, entry: Entry, whole: Tensor) -> Tensor:
        """Pads the vocabulary to a number of rows that the ranks can share evenly."""
        if not self._is_vocabulary(entry) or entry.dim is None:
            return whole
        missing = entry.shape[0] * self._tp(entry).size() - len(whole)
        return nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole

    @torch.no_grad()
    def export(self, dtype: torch.dtype | None, *, keep: bool) -> Iterator[dict[str, Tensor] | None]:
        """Yields a layer at a time, under the folder's names; None on ranks that do not `keep` it but take part in gathering.
        `dtype` None: unchanged."""
        for _, of_layer in groupby(self.entries, key=lambda entry: order_of(entry)[:2]):
            stacks = Stacks() if keep else None
            found = [piece for entries in self._batches(of_layer) for piece in self._pieces(entries, dtype, stacks)]
            # Experts by their numbers, in every layout.
            layer = {name: part for _, parts in sorted(found, key=lambda item: item[0]) for name, part in parts.items()}
            yield layer if keep else None

    @torch.no_grad()
    def as_gathered(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of `export` on all ranks, one after the other: it holds no more than one collective has gathered,
        while a layer may have 20 GB of experts. The order depends on the layout."""
        stacks = Stacks()
        for entries in self._batches(self.entries):
            for _, parts in self._pieces(entries, dtype, stacks):
                yield from parts.items()

    def _pieces(
        self, entries: Sequence[Entry], dtype: torch.dtype | None, stacks: Stacks | None
    ) -> Iterator[tuple[tuple[str, int], dict[str, Tensor]]]:
        """Yields tensors under the folder's names, each with its place in a layer. `stacks`: keeps the parts of those that are
        not complete; None: nothing is yielded."""
        for (entry, number), whole in self._wholes(entries, dtype).items():
            if stacks is not None:
                mine = whole[: self._vocab_size] if self._is_vocabulary(entry) else whole
                found = stacks.add(weight_of(self._bridge, entry, number), mine)
                yield (LOCAL_EXPERT.sub(".", entry.name), number or 0), found

    def _batches(self, entries: Iterable[Entry]) -> Iterator[list[Entry]]:
        """Groups of entries that are gathered together: of a layer with many experts, only some."""
        batch: list[Entry] = []
        size = 0
        for entry in entries:
            nbytes = len(self._experts(entry)) * math.prod(self._gathered_shape(entry)) * entry.dtype.itemsize
            if batch and size + nbytes > JOINT_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(entry)
            size += nbytes
        yield batch

    def _wholes(self, entries: Sequence[Entry], dtype: torch.dtype | None) -> dict[tuple[Entry, int | None], Tensor]:
        """Whole tensors by entry and expert number: gathered over EP and TP, then broadcast from their stage to the others.
        All ranks call it."""
        dtypes = {entry: entry.dtype if dtype is None or entry.is_bias_of_router else dtype for entry in entries}
        held = {
            entry: self._tensor(entry.name).to(dtypes[entry]) for entry in entries if entry.stage == self._pp.rank()
        }
        spread = [entry for entry in held if len(self._experts(entry)) > 1]
        parts = all_parts([held[entry] for entry in spread], parallel_state.get_expert_model_parallel_group())
        found: dict[tuple[Entry, int | None], Tensor] = {
            (entry, numbers[0]): tensor for entry, tensor in held.items() if len(numbers := self._experts(entry)) == 1
        }
        for entry, of_ranks in zip(spread, parts, strict=True):
            found.update(zip(((entry, number) for number in self._experts(entry)), of_ranks, strict=True))
        for group, experts in (
            (parallel_state.get_tensor_model_parallel_group(), False),
            (parallel_state.get_expert_tensor_parallel_group(), True),
        ):
            if group.size() == 1:
                continue
            cut = [key for key in found if key[0].dim is not None and (key[0].expert is not None) == experts]
            for key, shards in zip(cut, all_parts([found[key] for key in cut], group), strict=True):
                assert key[0].dim is not None
                found[key] = weight_of(self._bridge, *key).unshard(shards, key[0].dim)
        return found if self._pp.size() == 1 else self._over_stages(found, entries, dtypes)

    def _over_stages(
        self,
        found: Mapping[tuple[Entry, int | None], Tensor],
        entries: Sequence[Entry],
        dtypes: Mapping[Entry, torch.dtype],
    ) -> dict[tuple[Entry, int | None], Tensor]:
        """Sends what each stage has gathered to all of them; one broadcast for neighbours of a stage and dtype."""
        everywhere: dict[tuple[Entry, int | None], Tensor] = {}
        keys = [(entry, number) for entry in entries for number in self._experts(entry)]
        for (stage, kind), alike in groupby(keys, key=lambda key: (key[0].stage, dtypes[key[0]])):
            together = list(alike)
            shapes = [self._gathered_shape(entry) for entry, _ in together]
            sizes = [math.prod(shape) for shape in shapes]
            if stage == self._pp.rank():
                flat = torch.cat([found[key].reshape(-1) for key in together])
            else:
                flat = torch.empty(sum(sizes), dtype=kind, device=self._device)
            dist.broadcast(flat, group=self._pp, group_src=stage)
            for key, part, shape in zip(together, flat.split(sizes), shapes, strict=True):
                everywhere[key] = part.view(shape)
        return everywhere

    @property
    def _device(self) -> torch.device:
        return next(iter(self._tensors.values())).device


def weight_of(bridge: Bridge, entry: Entry, expert: int | None) -> Weight:
    name = entry.name if expert is None else LOCAL_EXPERT.sub(f".local_experts.{expert}.", entry.name)
    return bridge.weight(name)


def all_parts(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[tuple[Tensor, ...]]:
    """For each tensor, the parts of all ranks of the group; one collective for all tensors of a dtype."""
    found: list[tuple[Tensor, ...]] = [()] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        mine = torch.cat([tensors[number].reshape(-1) for number in alike])
        joined = gather_jointly(mine, [tensors[number].numel() for number in alike], group)
        for number, flat in zip(alike, joined, strict=True):
            found[number] = flat.view(group.size(), *tensors[number].shape).unbind()
    return found


def order_of(entry: Entry) -> tuple[int, int, str, int]:
    """Sort key: embedding, layers by number, the rest, layers of multi-token prediction."""
    if found := LAYER.match(entry.name):
        return 1, int(found[1]), LOCAL_EXPERT.sub(".", entry.name), entry.expert or 0
    if found := PREDICTION.match(entry.name):
        return 3, int(found[1]), LOCAL_EXPERT.sub(".", entry.name), entry.expert or 0
    return (0 if entry.name.startswith("embedding") else 2), 0, entry.name, 0


def write_folder(table: WeightTable, source: ModelFolder, target: Path, *, head: str) -> None:
    """Writes a folder for transformers, each tensor in the dtype of the source's. All ranks call it. Tensors of the source that
    are not loaded are copied unchanged."""

    def describe() -> None:
        copy_generation_and_code(source.path, target)
        raw = dict(source.raw)
        if head == "value":
            named = [LANGUAGE_MODEL.sub("ForTokenClassification", name) for name in raw.get("architectures") or ()]
            raw |= {"architectures": named, "num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")

    write_model(saved_weights(table, source, head), target, describe=describe, group=dist.group.WORLD)


def saved_weights(table: WeightTable, source: ModelFolder, head: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the same tensors on all ranks, one after the other."""
    known = set()
    for name, tensor in table.as_gathered(None):
        known.add(name)
        yield name, tensor.to(source.dtypes.get(name, source.dtype))
    for name in sorted(source.files.keys() - known):
        kept = head == "lm" and not re.search(r"^lm_head\.|inv_freq$", name)
        if kept or name.startswith(source.bridge.towers):
            yield name, source.read([name])[0]
