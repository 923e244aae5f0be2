"""A model of twenty thousand random parameters, and what transformers alone makes of it.

Legend: R response tokens of one sequence, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from slime_core.types.weights import Bucket
from slime_models.new_model import ModelSizes, new_model

ALPHABET: Final = "0123456789+= abcdefghij"
MAX_LENGTH: Final = 640
FIRST_TOKEN: Final = 2
"""Padding and the end come before."""


TINY: Final = ModelSizes(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_length=MAX_LENGTH
)
SERVED: Final = replace(TINY, hidden_size=64, num_heads=2, num_kv_heads=1)
"""With heads of 32 elements, the smallest that attention kernels of serving programs take on a CPU."""


def make_tiny_model(folder: Path, sizes: ModelSizes = TINY) -> Path:
    """A Qwen3 with weights far from zero, so that a wrong attention or norm shows."""
    new_model(folder, "qwen3", sizes, alphabet=ALPHABET, seed=3, initializer_range=0.3)
    return folder


def load_plain(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """With transformers, and nothing of ours."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def with_longer_header(folder: Path, target: Path, num_bytes: int) -> Path:
    """A copy in whose only file of weights all begin as many bytes later."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = content[8:start] + b" " * num_bytes
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
    return target


def moved(model: Any, seed: int, scale: float = 0.05) -> Any:
    """The same object with noise on every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(scale * noise.to(parameter.dtype))
    return model


def logits_of(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """(T, V) float64, one sequence alone."""
    output = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    logits: Tensor = output.logits[0].double() / temperature
    return logits


def log_probs_of(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(R,) log-probs of the response tokens, and (R,) entropies where they were chosen; with gradient, if it is on."""
    distribution = logits_of(model, [*prompt, *response], temperature).log_softmax(-1)
    rows = distribution[len(prompt) - 1 : len(prompt) + len(response) - 1]
    chosen = rows.gather(1, torch.tensor(list(response), dtype=torch.int64)[:, None])[:, 0]
    return chosen, -(rows.exp() * rows).sum(-1)


def named_weights(model: Any) -> dict[str, Tensor]:
    """By Hugging Face names, each once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def checksum_of(weights: Mapping[str, Tensor]) -> str:
    """xxh3-64 over all weights, in the order of names."""
    digest = xxhash.xxh3_64()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def buckets_of(weights: Mapping[str, Tensor], version: int, count: int) -> list[Bucket]:
    """The weights in `count` buckets, as a trainer exports them."""
    names = sorted(weights)
    parts = [names[start::count] for start in range(count)]
    buckets = []
    for index, part in enumerate(parts):
        data = np.concatenate([weights[n].contiguous().view(torch.uint8).numpy().reshape(-1) for n in part])
        buckets.append(
            Bucket(
                version=version,
                index=index,
                last=index == count - 1,
                names=part,
                dtypes=[str(weights[name].dtype).removeprefix("torch.") for name in part],
                shapes=[tuple(weights[name].shape) for name in part],
                data=data,
                checksum=xxhash.xxh3_64_hexdigest(data.tobytes()),
            )
        )
    return buckets


def unpacked(buckets: Sequence[Bucket | None]) -> dict[str, Tensor]:
    """The tensors of an export; AssertionError where a bucket differs from its description."""
    weights: dict[str, Tensor] = {}
    given = [bucket for bucket in buckets if bucket is not None]
    for index, bucket in enumerate(given):
        assert (bucket.index, bucket.last) == (index, index == len(given) - 1), (
            f"bucket {index} of {len(given)} has index {bucket.index} and last = {bucket.last}"
        )
        assert bucket.checksum == xxhash.xxh3_64_hexdigest(bucket.data.tobytes()), (
            f"the checksum of bucket {index} is wrong"
        )
        flat: Tensor = torch.from_numpy(np.array(bucket.data))
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            assert name not in weights, f"{name} is exported twice"
            weights[name] = flat[start : start + size].clone().view(kind).view(tuple(shape))
            start += size
        assert start == len(flat), f"bucket {index} holds {len(flat)} bytes, its tensors {start}"
    return weights


def prompts(count: int, seed: int = 0) -> list[npt.NDArray[np.int32]]:
    """Random prompts of 1 to 9 tokens."""
    rng = np.random.default_rng(seed)
    top = FIRST_TOKEN + len(ALPHABET)
    return [rng.integers(FIRST_TOKEN, top, rng.integers(1, 10)).astype(np.int32) for _ in range(count)]
