"""Server-sent events that are forwarded."""

from __future__ import annotations

from typing import Final

import msgspec

from slime_router.wire import response_decoder

END: Final = b"data: [DONE]\n\n"
SEPARATOR: Final = b"\n\n"
PREFIX: Final = b"data: "


class Stream:
    """Cuts the bytes of a stream into whole events. Keeps those that a middleware may read at the end: the last event, if
    each event repeats all tokens so far (SGLang's default), else all events."""

    def __init__(self, *, index: int | None, keep: bool) -> None:
        self._rest = b""
        self._keep = keep
        self._stamp = None if index is None else b'data: {"index":%d,' % index
        self._kept: list[bytes] = []
        self._repeats: bool | None = None
        self.ended = False
        """The event `[DONE]` has arrived."""

    def feed(self, chunk: bytes) -> bytes:
        """The whole events so far that were not yet returned, without `[DONE]`."""
        data = self._rest + chunk
        end = data.rfind(SEPARATOR)
        if end < 0:
            self._rest = data
            return b""
        events, self._rest = data[: end + 2], data[end + 2 :]
        if events.endswith(END):
            self.ended = True
            events = events[: -len(END)]
        if self._keep and events:
            self._note(events)
        if self._stamp is not None and events:
            # A blank line ends an event; JSON of an event contains none.
            events = (SEPARATOR + events).replace(SEPARATOR + b"data: {", SEPARATOR + self._stamp)[len(SEPARATOR) :]
        return events

    def _note(self, events: bytes) -> None:
        if self._repeats:
            start = events.rfind(SEPARATOR, 0, -2)
            self._kept = [events[start + 2 if start >= 0 else 0 : -2]]
            return
        self._kept += [event for event in events.split(SEPARATOR) if event]
        if self._repeats is None and len(self._kept) > 1:
            self._repeats = repeats(self._kept[1].removeprefix(PREFIX))
            if self._repeats:
                del self._kept[:-1]

    @property
    def parts(self) -> list[bytes]:
        """JSON of the kept events, which together are the whole response."""
        return [event.removeprefix(PREFIX) for event in self._kept]


def repeats(second_event: bytes) -> bool:
    """Whether the second event contains all tokens so far, not only its own."""
    try:
        response = response_decoder.decode(second_event)
    except msgspec.MsgspecError:
        return True
    completed = response.meta_info.completion_tokens
    return response.output_ids is None or completed is None or len(response.output_ids) >= completed
