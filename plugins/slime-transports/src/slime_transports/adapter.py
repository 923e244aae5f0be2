"""The transport `adapter`: a LoRA adapter in the run's folder, in peft's format, which servers load beside their weights."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_core.atomic_io.storage import is_full, storage_error
from slime_core.contracts.transport import SentReport
from slime_core.errors import EngineError
from slime_transports import folder
from slime_transports.flattened_bucket import bytes_of
from slime_transports.folder import FileEntry, Manifest
from slime_transports.folder_sender import FolderSender
from slime_transports.sender import Layers, WeightUpdate

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"


class AdapterSender(FolderSender):
    """Writes `RUN/weights/VERSION-IDENTITY/`, another folder each time that a version is sent: servers that are started again
    read it too. Its manifest has the checksum that servers compare before they load the adapter."""

    skips_frozen: ClassVar[bool] = False

    def send_version(self, layers: Layers, update: WeightUpdate) -> SentReport:
        if self._root is None:
            return SentReport()
        version, engines = update.version, update.engines
        tensors = {name: host(tensor) for layer in layers for name, tensor in (layer or {}).items()}
        if not tensors:
            raise EngineError(f"the trainer exported no adapter for version {version}.")
        identity = secrets.token_hex(8)
        beside = folder.begin(self._root / f"{version}-{identity}")
        try:
            entry = self._write(beside, tensors)
            written = folder.finish(beside, Manifest(version=version, identity=identity, buckets=(entry,)))
        finally:
            folder.clear(beside)
        try:
            self.after_write(written, engines)
            calls = self.servers.call_all(
                engines, lambda receiver: receiver.load_adapter(written, version), what=f"adapter of version {version}"
            )
            self.servers.finish(calls)
        finally:
            self.clear_old(version, [written])
        return SentReport(bytes_sent=entry.nbytes, buckets=1)

    def _write(self, target: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
        content = self.place.adapter_config
        assert content is not None, "set for a transport that sends adapters"
        path = target / WEIGHTS_FILE
        try:
            (target / CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
            save_file(dict(tensors), path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            if isinstance(error, OSError) or is_full(path, error):
                raise storage_error(path, error) from error
            raise
        digest, crc32 = xxhash.xxh3_64(), 0
        for tensor in tensors.values():
            content_bytes = bytes_of(tensor)
            digest.update(content_bytes)
            crc32 = zlib.crc32(content_bytes, crc32)
        return FileEntry(
            file=WEIGHTS_FILE,
            names=tuple(tensors),
            checksum=digest.hexdigest(),
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
            crc32=crc32,
        )


def host(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.device("cpu")).contiguous()
