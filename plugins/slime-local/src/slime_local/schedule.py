"""What comes to the engine between two decode steps: written down, or, in a replay, let in when it came then."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from slime_core.errors import EngineError
from slime_core.types.schedule import EngineEvent, EventKind
from slime_local.decoder import Decoder
from slime_local.request_row import RequestRow


class Gate:
    """Passes requests, aborts and weights to the decoder. Without a script it passes them at once."""

    def __init__(self, decoder: Decoder, *, records: bool) -> None:
        """`records`: keep the events until `drain_events` returns them."""
        self._decoder = decoder
        self._records = records
        self._steps = 0
        self._events: list[EngineEvent] = []
        self._script: deque[EngineEvent] = deque()
        self._arrived: dict[str, RequestRow] = {}
        self._to_abort: set[str] = set()
        self._moved = asyncio.Event()

    def replay_events(self, events: Sequence[EngineEvent]) -> None:
        self._script = deque(events)

    def drain_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    @property
    def scripted(self) -> bool:
        """There is something left that must come as it came then."""
        return bool(self._script)

    @property
    def waits(self) -> bool:
        """What came after this step has not come yet. The next process came when nothing of this one ran any more."""
        if not self._script or (self._script[0].kind is EventKind.RESTART and self._decoder.busy):
            return False
        return self._script[0].at <= self._steps

    def stepped(self) -> None:
        self._steps += 1
        self._advance()

    def submit(self, rows: Sequence[RequestRow]) -> None:
        if self._script:
            self._arrived |= {row.request.request_id: row for row in rows}
            self._advance()
        elif rows:
            self._submit(rows)

    def abort(self, names: set[str] | None) -> None:
        """None: all of them."""
        if self._script:
            self._to_abort |= (self._decoder.request_ids | self._arrived.keys()) if names is None else names
            self._advance()
        else:
            self._abort(self._decoder.request_ids & names if names is not None else set(self._decoder.request_ids))

    def fail(self, error: EngineError) -> None:
        """No decode step follows: fails the requests that have not been passed on, and lets weights in."""
        for row in self._arrived.values():
            row.ticket.fail(error)
        self._arrived.clear()
        self._script.clear()
        self._moved.set()

    async def may_load(self, version: int) -> None:
        """Returns when the weights of this version came; at once if there is nothing left that must come before them."""
        while self._script and not self._is_next(version):
            self._moved.clear()
            await self._moved.wait()

    def loaded(self, version: int) -> None:
        """They are active."""
        self._note(EventKind.VERSION, version=version)
        if self._script:
            self._script.popleft()
            self._advance()

    def _is_next(self, version: int) -> bool:
        event = self._script[0]
        return (event.at, event.kind, event.version) == (self._steps, EventKind.VERSION, version)

    def _submit(self, rows: Sequence[RequestRow]) -> None:
        self._note(EventKind.SUBMIT, tuple(row.request.request_id for row in rows))
        self._decoder.submit(rows)

    def _abort(self, names: set[str]) -> None:
        if names:
            self._note(EventKind.ABORT, tuple(sorted(names)))
            self._decoder.end(lambda row: row.request.request_id in names)

    def _note(self, kind: EventKind, names: tuple[str, ...] = (), version: int = -1) -> None:
        if self._records:
            self._events.append(EngineEvent(self._steps, kind, names, version))

    def _advance(self) -> None:
        """Passes on what the script has after this step, as far as it has arrived."""
        while self.waits:
            event = self._script[0]
            if event.kind is EventKind.RESTART:
                self._steps = 0
            elif event.kind is EventKind.SUBMIT and self._arrived.keys() >= set(event.names):
                self._submit([self._arrived.pop(name) for name in event.names])
            elif event.kind is EventKind.ABORT and self._to_abort >= set(event.names):
                self._to_abort -= set(event.names)
                self._abort(set(event.names))
            else:
                break
            self._script.popleft()
        if not self._script:
            self._submit_rest()
        self._moved.set()

    def _submit_rest(self) -> None:
        """Passes on what is not in the script."""
        rows, self._arrived = list(self._arrived.values()), {}
        names, self._to_abort = self._to_abort & {row.request.request_id for row in rows}, set()
        if rows:
            self._submit(rows)
        self._abort(names)
