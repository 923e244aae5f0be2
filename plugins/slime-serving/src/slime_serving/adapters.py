"""The LoRA adapters that the servers of an engine hold beside their weights, each under a name that requests give."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from slime_core.atomic_io.storage import storage_error
from slime_core.data.model_folder import shapes_in
from slime_core.errors import EngineError, EngineRefused, EngineUnavailable, ModelError
from slime_core.types.weights import Bucket
from slime_serving.adapter_options import AdapterOptions, linear_sizes
from slime_serving.connection import NoResponse
from slime_serving.whole_calls import WholeCalls
from slime_training.adapters.folder import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, low_rank_of, require_fit
from slime_training.adapters.low_rank import LowRank
from slime_training.bucket_order import BucketOrder
from slime_training.bucket_tensors import tensors_of


class ServedAdapters(ABC):
    """What was loaded into all servers. A subclass calls the servers of its program. An adapter is a folder in peft's format,
    which is there as long as the adapter: servers may read it again."""

    def __init__(self, config: AdapterOptions, folder: Path, model_path: Path, *, engine: str) -> None:
        """`folder`: of this engine alone. `engine`: its name in messages."""
        self._config = config
        self._folder = folder
        self._sizes = linear_sizes(shapes_in(model_path))
        self._engine = engine
        self._loaded: dict[str, Path] = {}
        self._leaving: dict[str, Path] = {}
        """On the servers, or on the way to or from them: no request can name it."""
        self._sends, self._frees = WholeCalls(), WholeCalls()
        """By adapter."""
        self._count = 0
        self._identity = secrets.token_hex(4)
        """External servers may have adapters of another run under the same names."""

    @abstractmethod
    async def send(self, name: str, folder: Path) -> None:
        """Loads it into all servers; EngineError if one does not take it."""

    @abstractmethod
    async def forget(self, name: str) -> None:
        """Frees it on all servers, also if some of them do not have it. No request uses it. If it raises EngineError, it is
        called once more later, and frees it on the others."""

    def problem_of_layers(self, layers: Sequence[str]) -> str | None:
        """Why the program cannot adapt these layers of the model, as a sentence; None: it can."""
        return None

    async def load(self, name: str, scale: float, bucket: Bucket) -> None:
        """See `AdapterEngine.load_adapter`."""
        # Also after a load that was cancelled.
        await self._frees.until_ended(name)
        where = f"{self._engine}, adapter {name}"
        held = self._loaded | self._leaving
        if name in held:
            raise EngineRefused(f"{where}: the name is in use.")
        if len(held) >= self._config.most_adapters:
            raise EngineRefused(
                f"{where}: it holds {len(held)} already. Drop one, or set a larger engine.max_adapters "
                f"({self._config.most_adapters})."
            )
        BucketOrder(where).expect(bucket)
        try:
            low_rank = low_rank_of(dict(tensors_of(bucket)), scale, where)
            require_fit(low_rank, self._sizes, where)
        except ModelError as error:
            raise EngineRefused(str(error)) from error
        if problem := self.problem_of_layers(list(low_rank.layers)):
            raise EngineRefused(f"{where}: {problem}")
        rank = largest_rank(low_rank)
        if rank > self._config.adapter_rank:
            raise EngineRefused(
                f"{where}: it has rank {rank}, and the servers take up to {self._config.adapter_rank}. Set "
                f"engine.max_adapter_rank = {rank}."
            )
        folder = self._folder / str(self._count)
        self._count += 1
        write(folder, low_rank)
        self._leaving[name] = folder
        try:
            await self._sends.shared(name, partial(self.send, self.served_name(name), folder.absolute()))
        except (NoResponse, EngineUnavailable):
            raise
        except EngineError as error:
            # The servers live: they report what is wrong with it. Where it cannot be freed, it stays one that leaves.
            with contextlib.suppress(EngineError):
                await self.free(name)
            raise EngineRefused(f"{where}: {error}") from error
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):
                await self.free(name)
            raise
        if self._leaving.get(name) is not folder or self._frees.runs(name):
            await self.free(name)
            raise EngineRefused(f"{where}: it was dropped while it was loaded.")
        self._loaded[name] = self._leaving.pop(name)

    def withdraw(self, name: str) -> None:
        """No request can name it afterwards. It need not exist."""
        if name in self._loaded:
            self._leaving[name] = self._loaded.pop(name)

    async def free(self, name: str) -> None:
        """Frees what was withdrawn, if it was. No request uses it."""
        if name in self._leaving:
            await self._frees.shared(name, partial(self._free, name))

    async def _free(self, name: str) -> None:
        # Servers that load it can forget it only then.
        await self._sends.until_ended(name)
        await self.forget(self.served_name(name))
        shutil.rmtree(self._leaving.pop(name), ignore_errors=True)

    def served_name(self, name: str) -> str:
        """Its name on the servers."""
        return f"{name}#{self._identity}"

    def problem(self, name: str | None) -> str | None:
        """Why no request can name it, as a sentence; None: it is loaded, or no adapter is asked for."""
        if name is None or name in self._loaded:
            return None
        return f'adapter "{name}" is not loaded. Loaded: {", ".join(sorted(self._loaded)[:8]) or "none"}.'

    async def leave(self) -> None:
        """Frees all on servers that live on. One that does not respond keeps them."""
        for name in list(self._loaded):
            self.withdraw(name)
        for name in list(self._leaving):
            with contextlib.suppress(EngineError):
                await self.free(name)

    async def close(self) -> None:
        """Called when no server responds any more."""
        await self._sends.all_ended()
        await self._frees.all_ended()
        shutil.rmtree(self._folder, ignore_errors=True)


def write(folder: Path, low_rank: LowRank) -> None:
    """In peft's format, without what trainers need (`write_adapter_folder`): only servers read it."""
    rank = largest_rank(low_rank)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": low_rank.scale * rank,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in low_rank.layers}),
    }
    path = folder / WEIGHTS_FILE
    try:
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        named = {FILE_PREFIX + name: tensor.contiguous() for name, tensor in low_rank.tensors().items()}
        save_file(named, path, metadata={"format": "pt"})
    except OSError as error:
        raise storage_error(path, error) from error


def largest_rank(low_rank: LowRank) -> int:
    return max((pair.a_RI.shape[0] for pair in low_rank.layers.values()), default=0)
