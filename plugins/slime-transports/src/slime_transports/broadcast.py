"""BroadcastGroup: the trainer's end of a process group with servers.

Servers join as torch's `init_process_group` does, under a group name of their own. The trainer already has a default group,
which must stay separate: so it builds the backend itself, under the keys that torch uses in the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_training.rendezvous import address_towards, listening_store

POLL_S: Final = 0.002
BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


class BroadcastError(EngineError):
    """Some engine did not join, left, or hangs, as the trainer sees it. The error of the engine's own call names it."""


class OpenStore(dist.Store):
    """A store whose waits end with `close`. torch's own waits run until they time out, in a thread that outlives its caller
    and crashes the process when it ends."""

    def __init__(self, store: dist.TCPStore) -> None:
        super().__init__()
        self._store = store
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._store.timeout).total_seconds()
        while not self._store.check(keys):
            if self._closed or time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks have come: {keys}")
            time.sleep(POLL_S)


class BroadcastGroup:
    """This process is rank 0. `join` and `broadcast` block, and raise BroadcastError; `abort` ends both from another
    thread."""

    def __init__(self, name: str, engines: Sequence[EngineEndpoint], *, device: str, timeout_s: float) -> None:
        self.name = name
        self.size = 1 + sum(engine.num_ranks for engine in engines)
        self._others = ", ".join(f"engine {engine.index}" for engine in engines)
        self.backend = BACKENDS[device]
        self.address = own_address(engines)
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if device == "cuda" else None
        self._timeout = timedelta(seconds=timeout_s)
        self._store = listening_store(self.address, timeout=self._timeout)
        self._open = OpenStore(self._store)
        self.port: int = self._store.port
        self._ends: dist.Backend | None = None

    def join(self) -> None:
        """Returns when all ranks have joined (gloo), or at once (NCCL, which connects at the first broadcast)."""
        # NCCL does not wait here, and needs more methods of a store.
        store = dist.PrefixStore(self.name, self._open if self.backend == "gloo" else self._store)
        store = dist.PrefixStore(f"{self.name}/", store)
        store = dist.PrefixStore(f"{self._device.type}/", store)
        if self.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            # Else it listens at the address of the host's name, or at the one that GLOO_SOCKET_IFNAME gives to the trainer.
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
            options._timeout = self._timeout
            with self._failing("joined"):
                self._ends = dist.ProcessGroupGloo(store, 0, self.size, options)
            return
        nccl = dist.ProcessGroupNCCL.Options()
        # Longer than the callers' timeout, because NCCL's own watchdog would end the process.
        nccl._timeout = self._timeout + timedelta(minutes=10)
        self._ends = dist.ProcessGroupNCCL(store, 0, self.size, nccl)

    def mark(self) -> torch.cuda.Event | None:
        """An event at the present point of the caller's stream: data computed before it can be sent."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def broadcast(self, data: Tensor, computed: torch.cuda.Event | None) -> None:
        """Broadcasts `data` to all ranks, concurrently with work of the caller's stream after `computed`."""
        assert self._ends is not None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if self._stream is None or computed is None:
            with self._failing("received a broadcast"):
                self._ends.broadcast([data], options).wait()
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            data.record_stream(self._stream)
            with self._failing("received a broadcast"):
                self._ends.broadcast([data], options).wait()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        # Gloo raises plain RuntimeErrors; NCCL's errors differ from other failures of this GPU.
        kinds = (TimeoutError, RuntimeError) if self.backend == "gloo" else (dist.DistError,)
        try:
            yield
        except kinds as error:
            raise BroadcastError(f"group {self.name}: not all of {self._others} have {what}: {error}") from error

    def abort(self) -> None:
        self._open.close()
        if self._ends is not None and self.backend == "nccl":
            self._ends.abort()
        self._ends = None


def own_address(engines: Sequence[EngineEndpoint]) -> str:
    """The address of this machine's interface to the engines; the loopback if all are on this machine. Raises EngineError for
    an engine that cannot be reached."""
    address = "127.0.0.1"
    for engine in engines:
        place = urlsplit(engine.url)
        where = f"engine {engine.index} ({engine.url})"
        if place.hostname is None:
            raise EngineError(f"{where}: not an address.")
        try:
            address = address_towards(place.hostname, place.port or 80)
        except OSError as error:
            raise EngineError(f"{where}: this machine has no route there: {error}.") from error
        if not ip_address(address).is_loopback:
            return address
    return address
