"""A Hugging Face folder: its family's bridge, its config, and its tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from slime_core.data.model_folder import check_weights, shapes_in
from slime_core.errors import ModelError
from slime_megatron.bridges.bridge import Bridge
from slime_megatron.bridges.family import BRIDGES, Family, family_problems
from slime_megatron.bridges.weight import Slot
from slime_training.listed_names import listed
from slime_training.model_config import config_file_of, with_rotated_share
from slime_training.weight_files import dtypes_in, file_of


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    path: Path
    bridge: Bridge
    raw: dict[str, Any]
    """config.json"""

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file that holds each tensor."""
        return file_of(self.path)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_in(self.path)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return dtypes_in(self.path)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights, from config.json; float32 if it has none."""
        text = self.raw.get("text_config", {})
        given = next((of[key] for of in (self.raw, text) for key in ("dtype", "torch_dtype") if of.get(key)), "float32")
        found = getattr(torch, str(given).removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def read(self, names: Sequence[str], slot: Slot | None = None) -> list[Tensor]:
        """`slot`: only this part of each tensor is read."""
        tensors = []
        for name in names:
            try:
                with safe_open(self.files[name], framework="pt") as opened:
                    whole = opened.get_tensor(name) if slot is None else opened.get_slice(name)[slot.index]
                    tensors.append(whole)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{self.files[name]}: {name} cannot be read: {error}") from error
        return tensors

    def check(self, expected: Mapping[str, tuple[int, ...]], *, unused: Iterable[str] = ()) -> None:
        """Raises ModelError if weights are missing, have no place in the model, or have another shape.
        `expected`: shapes of all weights of the whole model. `unused`: other names that may be in the folder."""
        problems = []
        if missing := sorted(expected.keys() - self.files.keys()):
            problems.append(f"{len(missing)} weights are missing from its files: {listed(missing)}")
        if extra := sorted(
            name for name in self.files.keys() - expected.keys() - set(unused) if not self.bridge.ignores(name)
        ):
            problems.append(f"the model has no place for {len(extra)} of its weights: {listed(extra)}")
        if other := [
            f"{name} (is {self.shapes[name]}, should be {shape})"
            for name, shape in sorted(expected.items())
            if self.shapes.get(name, shape) != shape
        ]:
            problems.append(f"{len(other)} weights do not have the shapes of its config.json: {listed(other)}")
        if problems:
            raise ModelError(f"{self.path}: " + "; ".join(problems) + ".")


def open_folder(path: Path, *, trust_remote_code: bool = False, weights: bool = True) -> ModelFolder:
    """Raises ModelError for a folder that cannot be trained, before any weight is read. `weights`: they are required."""
    file = config_file_of(path)
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if problems := family_problems(raw):
        raise ModelError(f"{file}: " + " ".join(problems))
    kind = bridge_of(raw["model_type"])
    try:
        if kind.config_type is not None:
            fields = {
                key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "architectures")
            }
            config = AutoConfig.for_model(kind.config_type, **fields)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        text = with_rotated_share(config.get_text_config())
        # That of a whole model is its own, whatever the config of its decoder has.
        text.tie_word_embeddings = config.tie_word_embeddings
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if raw.get("quantization_config"):
        raise ModelError(f"{file}: its weights are quantized. Set a folder with bfloat16 or float32 weights.")
    if weights:
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{path}: it has no weights (*.safetensors).")
        check_weights(path)
    return ModelFolder(path=path, bridge=kind(config=text, tensors=frozenset(file_of(path))), raw=raw)


def bridge_of(model_type: str) -> type[Bridge]:
    """Raises ModelError if several distributions register the family."""
    offered = list(entry_points(group=BRIDGES, name=model_type))
    if len({entry.value for entry in offered}) > 1:
        owners = ", ".join(sorted(f"{entry.dist.name if entry.dist else '?'} ({entry.value})" for entry in offered))
        raise ModelError(f'bridge "{model_type}": registered more than once: {owners}. Uninstall one of them.')
    family: type[Family] = offered[0].load()
    return family.load()
