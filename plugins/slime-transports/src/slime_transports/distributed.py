"""The transport `distributed`: the first trainer rank broadcasts flattened buckets to all ranks of all engines."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SentReport
from slime_core.errors import EngineError
from slime_transports.broadcast import BroadcastGroup
from slime_transports.broadcast_thread import BroadcastThread
from slime_transports.config import DistributedConfig
from slime_transports.flattened_bucket import FlattenedBucket
from slime_transports.receiver import GroupPlace, WeightReceiver
from slime_transports.sender import Layers, ServerSender, WeightUpdate, bucket_name


class DistributedSender(ServerSender):
    """Uses one group with all engines, as long as the engines stay the same. While the engines load a bucket, the next one
    is gathered, converted and flattened."""

    def __init__(self, config: DistributedConfig) -> None:
        super().__init__(config)
        # NCCL reads it once per process. SGLang sets it for itself; if only one side does, the first broadcast fails.
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        self._group: BroadcastGroup | None = None
        self._members: tuple[EngineEndpoint, ...] = ()
        self._names = secrets.token_hex(4)
        self._count = 0
        self._thread = BroadcastThread()

    def send_version(self, layers: Layers, update: WeightUpdate) -> SentReport:
        if self.place.rank != 0:
            return SentReport()
        buckets = bytes_sent = 0
        try:
            group = self._group_with(update.engines)
            self.servers.finish(self.servers.call_all(update.engines, update.begin))
            calls: list[Future[Any]] = []
            for bucket in self.buckets(layers):
                self.servers.wait(calls)
                calls = self._send_bucket(group, bucket, update)
                update.digest(bucket)
                buckets += 1
                bytes_sent += bucket.data.nbytes
            self.servers.wait(calls)
        except BaseException:
            self._abandon()
            raise
        return SentReport(bytes_sent=bytes_sent, buckets=buckets)

    def _send_bucket(self, group: BroadcastGroup, bucket: FlattenedBucket, update: WeightUpdate) -> list[Future[Any]]:
        calls = self.servers.call_all(
            update.engines,
            lambda receiver: receiver.take_broadcast(group.name, bucket, update.version),
            what=bucket_name(bucket, update.version),
        )
        return [*calls, self._thread.submit(group.broadcast, bucket.data, group.mark())]

    def _group_with(self, engines: Sequence[EngineEndpoint]) -> BroadcastGroup:
        if self._group is not None and self._members == tuple(engines):
            return self._group
        self._leave()
        # A name can be used once per server.
        name = f"slime-{self._names}-{self._count}"
        self._count += 1
        group = BroadcastGroup(name, engines, device=self.place.device, timeout_s=self._config.update_weights_timeout)
        offset = 1
        calls: list[Future[Any]] = [self._thread.submit(group.join)]
        for engine in engines:
            place = GroupPlace(
                name=name,
                address=group.address,
                port=group.port,
                backend=group.backend,
                size=group.size,
                first_rank=offset,
            )
            calls.append(self.servers.call(engine, partial(join, place), what=f"group {name}"))
            offset += engine.num_ranks
        self._group, self._members = group, tuple(engines)
        self.servers.wait(calls)
        return group

    def _leave(self) -> None:
        """Leaves the group together with the engines. An engine that is gone, or was restarted, has left already."""
        group, members = self._group, self._members
        self._group, self._members = None, ()
        if group is None:
            return
        for call in self.servers.call_all(members, lambda receiver: receiver.leave(group.name)):
            error = call.exception()
            if error is not None and not isinstance(error, EngineError):
                raise error
        group.abort()

    def _abandon(self) -> None:
        """Abandons the group after a failure, because its state is unknown: the next weight update makes a new one."""
        group, self._group, self._members = self._group, None, ()
        if group is not None:
            group.abort()
        self._thread.close()
        self._thread = BroadcastThread()

    def close(self) -> None:
        if self._servers is not None:
            self._leave()
        self._thread.close()
        super().close()


async def join(group: GroupPlace, receiver: WeightReceiver) -> None:
    await receiver.join(group)
