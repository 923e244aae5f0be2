"""Futures: results that clients fetch later, by long polling. They outlive the server: the journal has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from slime_core.errors import DataError, SlimeError, StorageError
from slime_core.registry.boundary import error_text, held
from slime_tinker.errors import not_found
from slime_tinker.journal import Journal, Statement, accepted, finished
from slime_tinker.records import Outcome, RequestRecord


class Futures:
    def __init__(self, journal: Journal, *, poll_s: float) -> None:
        """`poll_s`: how long a fetch waits before the client has to try again."""
        self._journal = journal
        self._poll_s = poll_s
        self._pending: dict[str, asyncio.Future[Outcome]] = {}
        self._requests: dict[str, tuple[str, int]] = {}
        """Tenant and bytes of those that are pending."""
        self._number: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        """Whether it is not done yet."""
        return request_id in self._pending

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def num_of(self, tenant: str) -> int:
        """The tenant's that are not done yet."""
        return self._number[tenant]

    def bytes_of(self, tenant: str) -> int:
        """Of their bodies."""
        return self._bytes[tenant]

    def expect(self, request: RequestRecord) -> None:
        """It will be resolved by this server."""
        self._pending[request.id] = asyncio.get_running_loop().create_future()
        size = len(request.body)
        self._requests[request.id] = request.tenant, size
        self._number[request.tenant] += 1
        self._bytes[request.tenant] += size

    def _forget(self, request_id: str) -> asyncio.Future[Outcome] | None:
        if (known := self._requests.pop(request_id, None)) is not None:
            tenant, size = known
            self._number[tenant] -= 1
            self._bytes[tenant] -= size
        return self._pending.pop(request_id, None)

    async def accept(self, request: RequestRecord, *beside: Statement) -> bool:
        """Returns when it is written down. False: it was accepted before, so the client has sent it twice."""
        while True:
            if request.id in self._pending:
                # It is written down when this write is, which follows its own, unless that fails.
                await self._journal.write([])
                if request.id in self._pending:
                    return False
            if await self._journal.outcome(request.id) is not None:
                return False
            # Meanwhile another request of the same id may have come.
            if request.id not in self._pending:
                break
        self.expect(request)
        try:
            await self._journal.write([*beside, accepted(request)])
        except StorageError:
            # Sent again, it is a new one.
            self._forget(request.id)
            raise
        return True

    async def resolve(self, request_id: str, outcome: Outcome, beside: Sequence[Statement] = ()) -> None:
        """Clients see it when it is written down, and wait while the disk is full."""
        try:
            await self._journal.write([finished(request_id, outcome), *beside], lasting=True)
        except DataError:
            outcome = failure(
                f"its result has {len(outcome.content):,} bytes, more than the server can keep.", user=True
            )
            await self._journal.write([finished(request_id, outcome), *beside], lasting=True)
        waiting = self._forget(request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)

    @contextlib.asynccontextmanager
    async def ended_by(self, request_id: str) -> AsyncIterator[None]:
        """Around the work of a request. An error that ends the server is also its result, so that no restart repeats it."""
        with held() as ended:
            yield
        error = ended.raised
        if error is None:
            return
        if isinstance(error, Exception) and not isinstance(error, SlimeError) and request_id in self:
            what = error_text(error)
            await self.resolve(
                request_id, failure(f"an error ended the server while this request ran: {what}.", user=False)
            )
        raise error

    async def fetch(self, request_id: str, tenant: str) -> Outcome | None:
        """None: it is not done; try again. RequestError for one that is not there."""
        pending = self._pending.get(request_id)
        if pending is not None and self._requests[request_id][0] == tenant:
            done, _ = await asyncio.wait([pending], timeout=self._poll_s)
            return pending.result() if done else None
        stored = await self._journal.outcome(request_id)
        if stored is None or stored[0] != tenant:
            raise not_found(f"request_id {request_id}: there is no such request of yours, or its result has expired.")
        return stored[1]


def json_outcome(content: dict[str, Any]) -> Outcome:
    return Outcome(content=json.dumps(content).encode(), is_proto=False)


def failure(message: str, *, user: bool) -> Outcome:
    content = {"error": message, "category": "user" if user else "server"}
    return Outcome(content=json.dumps(content).encode(), is_proto=False, failed=True)
