"""DeviceMemory: the device that a run is planned for, and its memory, from --device-memory or from this machine."""

from __future__ import annotations

import os
from typing import Final

from pydantic import ByteSize, TypeAdapter, ValidationError

from slime_core.errors import ConfigError
from slime_preflight.tenants import Target

SIZE: Final = TypeAdapter(ByteSize)


def parse_size(text: str) -> int:
    """`80GiB`, `141 GB`, `81559MiB`. ConfigError for anything else: a bare number would be taken for either."""
    message = f"--device-memory {text}: a size with its unit is required, such as 80GiB, 141GB or 81559MiB."
    if not text.strip()[-1:].isalpha():
        raise ConfigError(message)
    try:
        size = int(SIZE.validate_python(text))
    except ValidationError as error:
        raise ConfigError(message) from error
    if not size:
        raise ConfigError(message)
    return size


def target_of(asked_device: str, device_memory: str | None) -> Target:
    """`asked_device`: launcher.device. With a size, or `cuda`, GPUs are planned for though none is here."""
    import torch

    there = torch.cuda.is_available()
    given = None if device_memory is None else parse_size(device_memory)
    if asked_device == "cpu" or (asked_device == "auto" and given is None and not there):
        if given is not None:
            return Target(device="cpu", device_bytes=given, found="--device-memory")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Target(device="cpu", device_bytes=memory, found="this machine's")
    if given is not None:
        return Target(device="cuda", device_bytes=given, found="--device-memory")
    if there:
        properties = torch.cuda.get_device_properties(0)
        return Target(device="cuda", device_bytes=properties.total_memory, found=f"{properties.name}, here")
    return Target(device="cuda", device_bytes=None, found="no GPU is here")
