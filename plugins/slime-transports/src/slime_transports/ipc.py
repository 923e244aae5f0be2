"""The transport `ipc`: engines read the buckets in the trainer's memory.

On GPUs every rank of a colocated engine gets a CUDA IPC handle of the trainer rank on its device. On a CPU all map one
file of shared memory: unlike torch's own sharing this starts no helper process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup, SentReport
from slime_core.errors import EngineError
from slime_transports.flattened_bucket import FlattenedBucket, flat_buckets
from slime_transports.handles import DeviceMemory, SharedMemory
from slime_transports.receiver import Refused
from slime_transports.sender import Failure, Layers, ServerSender, WeightUpdate, bucket_name, gravest
from slime_transports.servers import receiver_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Message of a rank to the other ranks after each bucket."""

    handle: str = ""
    """Handle of its bucket; empty if no server reads it."""
    failure: Failure | None = None
    dead: Sequence[EngineEndpoint] = ()
    """Engines that have not responded: they do not close the handles that they had opened."""


class CollectiveError(Exception):
    """An error of a rank that every rank has received, in this turn."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__()
        self.turns = turns

    def as_error(self) -> Exception:
        found = gravest([turn.failure for turn in self.turns if turn.failure is not None])
        return found.kind(found.text)


class IpcSender(ServerSender):
    """While the engines load a bucket, the next one is gathered and flattened. A bucket is kept until it is loaded."""

    def setup(self, setup: SenderSetup) -> None:
        if setup.device == "cuda" and not setup.colocated:
            raise EngineError(
                'sync.transport = "ipc" requires engines on the devices of the trainer (launcher.colocate = true). '
                'For engines on other devices, set "distributed".'
            )
        super().setup(setup)

    @property
    def all_ranks(self) -> bool:
        return self.place.device == "cuda"

    def send_version(self, layers: Layers, update: WeightUpdate) -> SentReport:
        if self.place.device == "cuda":
            return self._share_devices(layers, update)
        if self.place.rank != 0:
            return SentReport()
        version, engines = update.version, update.engines
        for engine in engines:
            if urlsplit(engine.url).hostname not in ("127.0.0.1", "localhost", "::1"):
                raise EngineError(
                    f"transport ipc: engine {engine.index} ({engine.url}) is on another machine and cannot read this one's "
                    'memory. Set "distributed".'
                )
        self._begin(update, engines)
        buckets = bytes_sent = 0
        calls: list[Future[Any]] = []
        memory: SharedMemory | None = None
        try:
            for bucket in self.buckets(layers):
                following = SharedMemory(bucket)
                try:
                    self.servers.finish(calls)
                finally:
                    if memory is not None:
                        memory.close()
                    memory = following
                calls = [
                    self._load(engine, [memory.payload(receiver_of(engine))] * engine.num_ranks, bucket, version)
                    for engine in engines
                ]
                update.digest(bucket)
                buckets += 1
                bytes_sent += bucket.data.nbytes
            self.servers.finish(calls)
        finally:
            # After any failure: engines may still be reading.
            wait(calls)
            if memory is not None:
                memory.close()
        return SentReport(bytes_sent=bytes_sent, buckets=buckets)

    def _load(
        self, engine: EngineEndpoint, payloads: Sequence[str], bucket: FlattenedBucket, version: int
    ) -> Future[Any]:
        return self.servers.call(
            engine,
            lambda receiver: receiver.load_payloads(payloads, bucket, version),
            what=bucket_name(bucket, version),
        )

    def _begin(self, update: WeightUpdate, engines: Sequence[EngineEndpoint]) -> None:
        """Calls every server before any weights are sent: this also detects a server that is gone."""
        self.servers.finish(self.servers.call_all(engines, update.begin))

    # ---------------------------------------------------------------- devices

    def _share_devices(self, layers: Layers, update: WeightUpdate) -> SentReport:
        """All ranks exchange turns in lockstep: the handles of bucket i together with the result of bucket i - 1. A rank that
        fails between two turns reports it in the next one. A rank whose device no engine shares makes no handle."""
        mine, reader = self._engines_from_here(update.engines), self._reader(update.engines)
        buckets = bytes_sent = 0
        calls: list[Future[Any]] = []
        held: FlattenedBucket | None = None
        made: DeviceMemory | None = None
        sent: DeviceMemory | None = None
        try:
            self._begin(update, mine)
            for bucket in flat_buckets(layers, self._config.update_weight_buffer_size):
                assert bucket is not None, "an export with all_ranks gives every rank all tensors"
                self.servers.finish(calls)
                made = None if reader is None else DeviceMemory(bucket)
                handles = self._exchange("" if made is None or reader is None else made.payload(receiver_of(reader)))
                held, sent, made = bucket, made, None
                calls = [
                    self._load(
                        engine, handles[self.place.rank : self.place.rank + engine.num_ranks], bucket, update.version
                    )
                    for engine in mine
                ]
                update.digest(bucket)
                buckets += bool(mine)
                bytes_sent += bucket.data.nbytes if mine else 0
            self.servers.finish(calls)
            self._exchange("")
        except CollectiveError as known:
            release(made, sent if reader in dead_in(known.turns) else None)
            raise known.as_error() from None
        except Exception as error:
            wait(calls)
            # The other ranks are in their next turn, or will be.
            turns = self.all_gather(Turn(failure=Failure.of(error), dead=without_response(mine, calls)))
            release(made, sent if reader in dead_in(turns) else None)
            raise
        del held
        return SentReport(bytes_sent=bytes_sent, buckets=buckets)

    def _exchange(self, handle: str) -> list[str]:
        """Returns every rank's handle. Raises CollectiveError on all ranks if one of them has an error."""
        turns = self.all_gather(Turn(handle=handle))
        if any(turn.failure is not None for turn in turns):
            raise CollectiveError(turns)
        return [turn.handle for turn in turns]

    def _engines_from_here(self, engines: Sequence[EngineEndpoint]) -> list[EngineEndpoint]:
        """Engines whose first rank shares this rank's device."""
        return [server for server, ranks in self._devices_of(engines) if ranks.start == self.place.rank]

    def _reader(self, engines: Sequence[EngineEndpoint]) -> EngineEndpoint | None:
        """The engine of which some rank shares this rank's device."""
        return next((server for server, ranks in self._devices_of(engines) if self.place.rank in ranks), None)

    def _devices_of(self, engines: Sequence[EngineEndpoint]) -> Iterator[tuple[EngineEndpoint, range]]:
        """Each engine with the trainer's ranks that share its devices. Engines have equal sizes and consecutive devices, also
        if some of them are out of service."""
        for index in sorted({engine.index for engine in engines}):
            servers = [engine for engine in engines if engine.index == index]
            first = index * sum(server.num_ranks for server in servers)
            for server in servers:
                yield server, range(first, first + server.num_ranks)
                first += server.num_ranks
            if first > self.place.world_size:
                raise EngineError(
                    f"transport ipc: the engines up to {index} have {first} ranks, the trainer's devices are "
                    f"{self.place.world_size}."
                )


def release(*memories: DeviceMemory | None) -> None:
    for memory in memories:
        if memory is not None:
            memory.release()


def without_response(engines: Sequence[EngineEndpoint], calls: Sequence[Future[Any]]) -> list[EngineEndpoint]:
    """Engines whose call got no response. `calls`: one finished call per engine, or none at all."""
    errors = [call.exception() for call in calls]
    return [
        engine
        for engine, error in zip(engines, errors, strict=False)
        if error is not None and not isinstance(error, Refused)
    ]


def dead_in(turns: Sequence[Turn]) -> set[EngineEndpoint]:
    return {engine for turn in turns for engine in turn.dead}
