"""Files of a Hugging Face model folder that is written or converted: tensors, the index over several files, and files without
weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from slime_core.data.model_folder import INDEX


def checksum_of(tensor: Tensor) -> str:
    """xxh3-64 of type, shape and bytes of a tensor on the host."""
    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def copy_small_files(source: Path, target: Path) -> None:
    """Copies config, tokenizer and other small files, without weights and their index."""
    target.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth") and file.name != INDEX:
            shutil.copyfile(file, target / file.name)


def copy_generation_and_code(source: Path, target: Path) -> None:
    """Copies the files that a saved model requires beside config and tokenizer: the generation config, and the modules that
    `auto_map` of its config names."""
    for file in sorted([*source.glob("generation_config.json"), *source.glob("*.py")]):
        shutil.copyfile(file, target / file.name)


def gather_weights(parts: Sequence[Path], target: Path) -> None:
    """Moves files of weights to transformers' names for several files, then writes their index. After an interruption, files
    may already be in `target`."""
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
    """Bytes behind the header, whose length is in the first eight bytes."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def file_of(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def dtypes_in(folder: Path) -> dict[str, torch.dtype]:
    """Dtypes of all tensors: in a half-precision folder some, such as biases of routers, are float32."""
    found: dict[str, torch.dtype] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            # Memory-mapped, not read.
            found |= {name: opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118
    return found
