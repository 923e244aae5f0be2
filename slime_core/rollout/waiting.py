"""WaitingRequests: requests that no engine has room for, oldest first, in a queue per set of required engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from slime_core.types.completion import GenerateRequest

Engines: TypeAlias = tuple[int, ...]


class WaitingRequests:
    """Queues of requests, which have unique ids."""

    def __init__(self, every: Engines = ()) -> None:
        """`every`: a request with this very tuple can go to any engine, like one with an empty tuple."""
        self._every = every
        self._queues: dict[Engines, OrderedDict[str, tuple[int, GenerateRequest]]] = {}
        self._last = 0
        self._first = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def engines_of(self, request: GenerateRequest) -> Engines:
        """Engines that the request requires; empty: any."""
        return () if request.engines is self._every else request.engines

    def append(self, request: GenerateRequest) -> None:
        self._last += 1
        self._queues.setdefault(self.engines_of(request), OrderedDict())[request.request_id] = (self._last, request)

    def put_first(self, requests: Sequence[GenerateRequest]) -> None:
        """Inserts requests before all waiting ones, in this order."""
        for request in reversed(requests):
            self._first -= 1
            queue = self._queues.setdefault(self.engines_of(request), OrderedDict())
            queue[request.request_id] = (self._first, request)
            queue.move_to_end(request.request_id, last=False)

    def pop(self, full: Collection[Engines] = ()) -> GenerateRequest | None:
        """Removes and returns the oldest request whose engines are not in `full`; None if there is none."""
        heads = [(next(iter(queue.values()))[0], key) for key, queue in self._queues.items() if key not in full]
        if not heads:
            return None
        _, engines = min(heads)
        _, (_, request) = self._queues[engines].popitem(last=False)
        if not self._queues[engines]:
            del self._queues[engines]
        return request

    def take(self, request_ids: Iterable[str]) -> list[GenerateRequest]:
        """Removes those of `request_ids` that wait; returns them, oldest first."""
        taken = [queue.pop(name) for name in request_ids for queue in self._queues.values() if name in queue]
        self._queues = {engines: queue for engines, queue in self._queues.items() if queue}
        return [request for _, request in sorted(taken, key=lambda entry: entry[0])]

    def clear(self) -> None:
        self._queues.clear()
