"""Events of a run as sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from slime_viewer.open_run import seconds_of
from slime_viewer.spans import TIMES

Event = Mapping[str, Any]


def engine(event: Event) -> str:
    return f"engine {event.get('engine')}"


def started(event: Event) -> str:
    if not event.get("rollout_id"):
        return "The run began."
    return f"Attempt {event.get('attempt')} began, from step {event['rollout_id']}."


def ended(event: Event) -> str:
    error = event.get("error")
    return "The run is complete." if error is None else f"The attempt ended: {error}"


def sample_failed(event: Event) -> str:
    again = "it is tried again" if event.get("will_retry") else "no try is left"
    return f"Sample {event.get('sample')} of group {event.get('group')} failed, {again}: {event.get('error')}"


TEXTS: Final[Mapping[str, Callable[[Event], str]]] = {
    "run_start": started,
    "run_end": ended,
    "checkpoint_saved": lambda event: (
        f"A checkpoint was saved in {event.get('seconds')} s; the run waited for {event.get('blocked_seconds')} s of them."
    ),
    "engine_lost": lambda event: (
        f"{engine(event).capitalize()} was lost; {event.get('redispatched')} requests went to others: {event.get('error')}"
    ),
    "engine_restarted": lambda event: f"{engine(event).capitalize()} was started again in {event.get('seconds')} s.",
    "engine_recovered": lambda event: (
        f"{engine(event).capitalize()} has version {event.get('version')}, {event.get('seconds')} s after it was lost."
    ),
    "sample_failed": sample_failed,
    "weights_compared": lambda event: (
        f"The weights of version {event.get('version')} were compared: {event.get('compared_with')}."
    ),
    "loop_held": lambda event: f"The event loop was blocked for {event.get('seconds')} s in {event.get('where')}.",
}


def event_text(event: Event) -> str:
    """A sentence; for an event of another release, its fields."""
    name = str(event.get("event"))
    if name in TEXTS:
        return TEXTS[name](event)
    rest = {key: value for key, value in event.items() if key not in ("time", "attempt", "event")}
    return f"{name}: {', '.join(f'{key} {value}' for key, value in rest.items())}"


def event_page(events: Sequence[Event], offset: int, limit: int) -> dict[str, Any]:
    """The reply to `/api/runs/{id}/events`, the newest first, without those that the timeline draws."""
    events = [event for event in events if event.get("event") not in TIMES]
    page = events[::-1][offset : offset + limit]
    return {
        "total": len(events),
        "offset": offset,
        "time": [seconds_of(event.get("time")) or math.nan for event in page],
        "attempt": [event.get("attempt", 1) for event in page],
        "event": [str(event.get("event")) for event in page],
        "text": [event_text(event) for event in page],
        "step": [event.get("rollout_id") for event in page],
    }
