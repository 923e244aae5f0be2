"""Opens buckets by reference: a mapped file, or a CUDA IPC handle of the trainer's rank on the same device."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor


def opened(payload: str, device: torch.device, *, copies: bool) -> Tensor:
    """(bytes,) uint8. A handle's memory belongs to the trainer, which uses it again after the response. `copies`: it is copied,
    because loaders may keep tensors longer than that."""
    given: dict[str, Any] = json.loads(payload)
    if "path" in given:
        # vLLM keeps tensors until their layer is complete, in a later call perhaps: the mapping stays as long.
        return torch.from_file(given["path"], shared=True, size=given["size"], dtype=torch.uint8)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if given["device"] != uuid:
        raise ValueError(f"the handle is of device {given['device']}, this worker's is {uuid}")
    shared: Tensor = rebuild_cuda_tensor(
        Tensor,
        torch.Size([given["size"]]),
        (1,),
        given["offset"],
        torch.UntypedStorage,
        torch.uint8,
        device.index,
        base64.b64decode(given["handle"]),
        given["storage_size"],
        given["storage_offset"],
        False,
        base64.b64decode(given["counter"]),
        given["counter_offset"],
        base64.b64decode(given["event"]),
        given["event_sync"],
    )
    return shared.clone() if copies else shared
