"""Process groups with the trainer's first rank, beside vLLM's own groups. See slime_transports.broadcast for the other end."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

JOINED_S: Final = timedelta(minutes=10)

# Read once per process; the trainer sets it too, or the first broadcast fails.
os.environ["NCCL_CUMEM_ENABLE"] = "0"


def join(place: Mapping[str, Any], rank: int, device: torch.device) -> dist.Backend:
    """`rank`: of this worker in its server."""
    address, port = str(place["address"]), int(place["port"])
    store: dist.Store = dist.TCPStore(address, port, timeout=JOINED_S)
    for prefix in (place["name"], f"{place['name']}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    number, size = int(place["first_rank"]) + rank, int(place["size"])
    if place["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = JOINED_S
        return dist.ProcessGroupNCCL(store, number, size, options)
    settings = dist.ProcessGroupGloo._Options()
    # Else it listens at the address of the host's name.
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address, port))]
    settings._timeout = JOINED_S
    return dist.ProcessGroupGloo(store, number, size, settings)


def own_address(other: str, port: int) -> str:
    """The address of this machine's interface to another."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, port))
        return str(probe.getsockname()[0])


def broadcast(group: dist.Backend, size: int, device: torch.device) -> torch.Tensor:
    """(size,) uint8 from the trainer."""
    data = torch.empty(size, dtype=torch.uint8, device=device)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([data], options).wait()
    return data
