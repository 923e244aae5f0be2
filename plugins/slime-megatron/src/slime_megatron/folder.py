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
        """What its config says of most of them."""
        said = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        found = getattr(torch, str(said).removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def read(self, names: Sequence[str]) -> list[Tensor]:
        tensors = []
        for name in names:
            try:
                with safe_open(self.files[name], framework="pt") as opened:
                    tensors.append(opened.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{self.files[name]}: {name} cannot be read: {error}") from error
        return tensors

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, unused: Iterable[str] = ()) -> None:
        """ModelError for weights that are missing, those that the model has no place for, and those of another shape.
        `wanted`: shapes of all weights of the whole model; `unused`: what else may be there."""
        problems = []
        if missing := sorted(wanted.keys() - self.files.keys()):
            problems.append(f"{len(missing)} weights are missing from its files: {listed(missing)}")
        if extra := sorted(
            name for name in self.files.keys() - wanted.keys() - set(unused) if not self.bridge.ignores(name)
        ):
            problems.append(f"the model has no place for {len(extra)} of its weights: {listed(extra)}")
        if other := [
            f"{name} (is {self.shapes[name]}, should be {shape})"
            for name, shape in sorted(wanted.items())
            if self.shapes.get(name, shape) != shape
        ]:
            problems.append(f"{len(other)} weights have other shapes than its config.json says: {listed(other)}")
        if problems:
            raise ModelError(f"{self.path}: " + "; ".join(problems) + ".")


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def open_folder(path: Path, *, trust_remote_code: bool = False, weights: bool = True) -> ModelFolder:
    """Raises ModelError for what cannot be trained, before any weight is read. `weights`: they must be there."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder. Give a Hugging Face model folder (config.json, *.safetensors).")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: it has no config.json, so it is not a Hugging Face model folder.")
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if raw.get("quantization_config"):
        raise ModelError(f"{file}: its weights are quantised; give a folder with bfloat16 or float32 weights.")
    if weights:
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{path}: it has no weights (*.safetensors).")
        check_weights(path)
    return ModelFolder(path=path, bridge=kind(config=config), raw=raw)


def bridge_of(model_type: str) -> type[Bridge]:
    """ModelError if several distributions offer it."""
    offered = list(entry_points(group=BRIDGES, name=model_type))
    if len({entry.value for entry in offered}) > 1:
        owners = ", ".join(sorted(f"{entry.dist.name if entry.dist else '?'} ({entry.value})" for entry in offered))
        raise ModelError(f'bridge "{model_type}": offered more than once: {owners}. Uninstall one of them.')
    family: type[Family] = offered[0].load()
    return family.load()
