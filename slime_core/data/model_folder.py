"""A Hugging Face model folder: its config, weights and tokenizer, with errors for what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slime_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX: Final = "model.safetensors.index.json"
"""Index of weights in several files: the file of each tensor."""
PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Preprocessing configs of models with images or videos."""
CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names of a model's longest sequence in its config."""
EXTENDED: Final = ("yarn", "dynamic")
"""Kinds of rotary embeddings whose `factor` multiplies the longest sequence."""
NO_LIMIT: Final = 2**20
"""Tokens; for a model whose config has no longest sequence."""
WEIGHT_PATTERNS: Final = ("*.safetensors", "pytorch_model*.bin")


def read_model_config(folder: Path, *, where: str = "model.hf_checkpoint") -> dict[str, Any]:
    """Reads config.json; raises ModelError if there is none. where: the key that sets the folder, for messages."""
    if not folder.is_dir():
        raise ModelError(f"{where} = {folder}: no such folder. Set a folder with config.json and weights.")
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{where} = {folder}: no config.json in it; there is {there}. See `slime convert`.") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    return config


def check_weights(folder: Path, *, where: str = "model.hf_checkpoint") -> None:
    """Raises ModelError without weights, for truncated files or an index with missing ones; backends check shapes."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            # Opening reads only the header and compares it with the file size.
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file}: damaged or cut short ({error}). Copy or download it again; it has {file.stat().st_size} bytes."
            ) from error
    if not any(file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)):
        raise ModelError(f"{where} = {folder}: no weights in it ({' or '.join(WEIGHT_PATTERNS)}). Copy them there.")
    check_index(folder / INDEX)


def check_index(index: Path) -> None:
    """Raises ModelError if a file that the index names is not beside it. The index need not exist."""
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read: {error!r}. Copy or download it again.") from error
    if missing := sorted(name for name in named if not (index.parent / name).is_file()):
        raise ModelError(f"{index}: it names files that are not there: {', '.join(missing)}. Copy them there.")


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by name, read from the file headers."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


def copy_processor(source: Path, target: Path) -> None:
    """Copies the preprocessing configs, which a model with images needs beside weights and tokenizer."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def context_length(model_config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that the model reads; None if its config has no such number."""
    text = model_config.get("text_config", model_config)
    stated: int | None = next(
        (text[key] for key in CONTEXT_KEYS if isinstance(text.get(key), int) and text[key] > 0), None
    )
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if stated is None or not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in EXTENDED:
        return stated
    return max(stated, int(rope.get("factor", 1) * (rope.get("original_max_position_embeddings") or stated)))


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads the folder's tokenizer; raises ModelError if there is none or it cannot be read."""
    if not has_tokenizer(folder):
        raise ModelError(
            f"{folder}: no tokenizer in it (tokenizer.json or tokenizer_config.json). Copy the tokenizer's files there."
        )
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    # The run shows its own progress bar.
    disable_progress_bar()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer
