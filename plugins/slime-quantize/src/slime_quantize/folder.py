"""QuantizeFolder: a Hugging Face folder with quantized linear layers; a piece is one of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime_core.contracts.converter import Checksums, Converter, Shard
from slime_core.data.model_folder import check_weights, read_model_config, shapes_in
from slime_core.errors import ModelError
from slime_quantize.scheme import Scheme
from slime_training.weight_files import checksum_of, copy_small_files, gather_weights

WEIGHTS: Final = "model.safetensors"
LAYER: Final = re.compile(r"(^|\.)layers\.\d+\.")
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


class QuantizeFolder(Converter):
    def __init__(self, scheme: Scheme, ignore: Sequence[str]) -> None:
        self._scheme = scheme
        self._ignore = [re.compile(pattern) for pattern in ignore]

    def pieces(self, source: Path) -> Sequence[Shard]:
        config = read_model_config(source, where="SOURCE")
        if config.get("quantization_config"):
            raise ModelError(f"{source}: its weights are quantized already; give the folder that they were made from.")
        files = sorted(source.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{source}: it has no weights (*.safetensors).")
        check_weights(source)
        for name, shape in shapes_in(source).items():
            if self.is_quantized(name, shape):
                self._scheme.check(name, shape)
        return [Shard(name=file.stem, num_bytes=file.stat().st_size) for file in files]

    def is_quantized(self, name: str, shape: Sequence[int]) -> bool:
        """Matrices of linear layers inside the decoder's layers."""
        layer = name.removesuffix(".weight")
        linear = layer != name and len(shape) == 2 and LAYER.search(name) is not None
        return linear and not any(pattern.search(layer) for pattern in self._ignore)

    def write(self, source: Path, piece: Shard, folder: Path) -> Checksums:
        made: dict[str, Tensor] = {}
        file = source / f"{piece.name}.safetensors"
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    made |= self.converted(name, opened.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
        save_file(made, folder / WEIGHTS, metadata={"format": "pt"})
        return {name: checksum_of(tensor) for name, tensor in made.items()}

    def converted(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        if not self.is_quantized(name, tensor.shape) or tensor.dtype not in FLOATS:
            return {name: tensor}
        if not tensor.isfinite().all():
            raise ModelError(f"{name}: it holds numbers that are not finite, which have no scale.")
        layer = name.removesuffix("weight")
        return {layer + part: made for part, made in self._scheme.quantized(tensor).items()}

    def finish(self, source: Path, folders: Mapping[str, Path], target: Path) -> None:
        gather_weights([folder / WEIGHTS for folder in folders.values()], target)
        copy_small_files(source, target)
        config = read_model_config(source, where="SOURCE")
        (target / "config.json").write_text(
            json.dumps(config | {"quantization_config": dict(self._scheme.config(self.kept(source)))}, indent=2) + "\n"
        )

    def kept(self, source: Path) -> list[str]:
        """Matrices that engines would look for in quantized form; the embedding is none."""
        found = {"lm_head"}
        for name, shape in shapes_in(source).items():
            if (
                name.endswith(".weight")
                and len(shape) == 2
                and "embed" not in name
                and not self.is_quantized(name, shape)
            ):
                found.add(name.removesuffix(".weight"))
        return sorted(found)

    def read_back(self, source: Path, piece: Shard, target: Path) -> Checksums:
        number = sorted(file.stem for file in source.glob("*.safetensors")).index(piece.name)
        found = {}
        file = sorted(target.glob("*.safetensors"))[number]
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                found[name] = checksum_of(opened.get_tensor(name))
        return found
