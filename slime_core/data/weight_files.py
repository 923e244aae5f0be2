"""Files of a Hugging Face model folder beside each other: the index over several of weights, and all that is no weight."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX: Final = "model.safetensors.index.json"


def checksum_of(tensor: Tensor) -> str:
    """xxh3-64 of its type, shape and bytes. Of a tensor on the host."""
    import torch

    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def copy_small_files(source: Path, target: Path) -> None:
    """Config, tokenizer and the like; weights and their index stay."""
    target.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth") and file.name != INDEX:
            shutil.copyfile(file, target / file.name)


def gather_weights(parts: Sequence[Path], target: Path) -> None:
    """Moves files of weights, which may be in `target` already after an interruption, to the names that
    transformers gives several of them; then writes their index."""
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        if part.exists():
            part.rename(target / name)
        with safe_open(target / name, framework="numpy") as opened:
            weight_map |= dict.fromkeys(opened.keys(), name)
        total += tensor_bytes(target / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tensor_bytes(file: Path) -> int:
    """What is behind the header, whose length stands in the first eight bytes."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def file_of(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def dtypes_in(folder: Path) -> dict[str, torch.dtype]:
    """Of all tensors: in half precision some, biases of routers above all, are float32 beside the others."""
    from safetensors import safe_open

    found: dict[str, torch.dtype] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            # Mapped, not read.
            found |= {name: opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118
    return found


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors, by the headers of their files."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found
