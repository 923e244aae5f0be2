"""Adapters in files: peft's format, and beside it the state of the optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_core.atomic_io.storage import written
from slime_core.errors import CheckpointError, ConfigError, ModelError
from slime_training.adapters.low_rank import LowRank, Matrices
from slime_training.adapters.shape import AdapterShape
from slime_training.replaced_folder import replaced_folder

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
SHAPE_KEY: Final = "slime_parts"
"""Which parts of the model the adapter was made for; peft ignores keys that it does not know."""
STEPS_KEY: Final = "optimizer_steps"
FILE_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterCopy:
    """An adapter as it was at one instant, in host memory; plain data."""

    low_rank: LowRank
    shape: AdapterShape
    base: Path
    """The model's folder."""
    optimizer: Mapping[str, Tensor] | None
    """Its state by name; None: not copied."""
    steps: int

    def write(self, folder: Path) -> None:
        """See `write_adapter_folder`. Raises StorageError."""
        with written(folder):
            write_adapter_folder(
                folder, self.low_rank, self.shape, base=self.base, optimizer=self.optimizer, steps=self.steps
            )


def write_adapter_folder(
    folder: Path,
    adapter: LowRank,
    shape: AdapterShape,
    *,
    base: Path,
    optimizer: Mapping[str, Tensor] | None,
    steps: int,
) -> None:
    """Complete or absent; an earlier folder of this name is replaced. base: the model's folder. optimizer: its tensors by name;
    None: not saved. Raises OSError."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(adapter.layers),
    }
    tensors = {FILE_PREFIX + name: plain(tensor) for name, tensor in adapter.tensors().items()}
    parts = {"attention": shape.attention, "mlp": shape.mlp, "unembedding": shape.unembedding}
    with replaced_folder(folder) as aside:
        save(tensors, aside / WEIGHTS_FILE, {"format": "pt", SHAPE_KEY: json.dumps(parts)})
        if optimizer is not None:
            state = {name: plain(tensor) for name, tensor in optimizer.items()}
            save(state, aside / OPTIMIZER_FILE, {STEPS_KEY: str(steps)})
        (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def save(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    try:
        save_file(dict(tensors), file, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_adapter_folder(folder: Path) -> tuple[LowRank, AdapterShape]:
    """float32 on the CPU. ModelError for what is no plain LoRA adapter."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_bytes())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        tensors = load_file(folder / WEIGHTS_FILE)
        parts: Mapping[str, Any] = json.loads(metadata_of(folder / WEIGHTS_FILE).get(SHAPE_KEY, "{}"))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{folder}: it cannot be read as an adapter: {type(error).__name__}: {error}") from error
    other = [key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if config.get(key)]
    if config.get("peft_type") != "LORA" or other:
        raise ModelError(f"{file}: {', '.join(other) or config.get('peft_type')}: only plain LoRA is understood.")
    if strange := [name for name in tensors if not name.startswith(FILE_PREFIX)]:
        raise ModelError(f"{folder / WEIGHTS_FILE}: {strange[0]} does not begin with {FILE_PREFIX}.")
    named = {name.removeprefix(FILE_PREFIX): tensor.float() for name, tensor in tensors.items()}
    try:
        shape = AdapterShape(rank=rank, alpha=alpha, **parts)
    except (ConfigError, TypeError) as error:
        raise ModelError(f"{folder}: {error}") from error
    return low_rank_of(named, shape.scale, str(folder)), shape


def low_rank_of(tensors: Mapping[str, Tensor], scale: float, where: str) -> LowRank:
    """Of tensors by the names of `LowRank.tensors`. ModelError if they are no pairs of matrices that fit each other."""
    layers: dict[str, Matrices] = {}
    for name, tensor in tensors.items():
        layer, inside, rest = name.rpartition(".lora_A.weight")
        if not inside or rest:
            continue
        other = tensors.get(f"{layer}.lora_B.weight")
        if tensor.ndim != 2 or other is None or other.ndim != 2 or other.shape[1] != tensor.shape[0]:
            raise ModelError(f"{where}: the matrices of {layer} do not fit each other.")
        layers[layer] = Matrices(tensor, other)
    if 2 * len(layers) != len(tensors):
        raise ModelError(
            f"{where}: {len(tensors)} tensors and {len(layers)} adapted layers: some are no LoRA matrices."
        )
    return LowRank(scale=scale, layers=layers)


def require_fit(adapter: LowRank, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
    """ModelError unless the model has these linear layers. `sizes`: features out and in of all of its linear layers."""
    for name, pair in adapter.layers.items():
        size = (pair.b_OR.shape[0], pair.a_RI.shape[1])
        if name not in sizes:
            raise ModelError(f"{where}: it adapts {name}, and the model has no such linear layer.")
        if sizes[name] != size:
            raise ModelError(f"{where}: {name} has {sizes[name]} features out and in, and its matrices are for {size}.")


def read_optimizer_file(folder: Path, names: Iterable[str]) -> tuple[dict[str, Tensor], int]:
    """The tensors of these names, and the steps taken. CheckpointError if there is no such file or it lacks one."""
    file = folder / OPTIMIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: it was saved without its optimizer. Load it without (optimizer=False).")
    try:
        found, steps = load_file(file), int(metadata_of(file)[STEPS_KEY])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if lacking := sorted(set(names) - found.keys()):
        raise CheckpointError(
            f"{file}: {lacking[0]} is missing. It was saved with another optimizer: set the same, or load it without "
            "(optimizer=False)."
        )
    return found, steps


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.device("cpu")).contiguous()


def copied(tensor: Tensor) -> Tensor:
    """On the host, with memory of its own."""
    return tensor.detach().to(torch.device("cpu"), copy=True).contiguous()
