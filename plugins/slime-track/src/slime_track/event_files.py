"""Event files, and the removal of events that a resumed run will log again.

TensorBoard's own method, a session start with the step from which events are void, has one step for all tags of a folder. A run
has several axes, so each event is preceded by a marker with its rollout.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter

from slime_core.errors import StorageError

_MARKER = "rollout_id="
# A record is length (8 bytes), checksum (4), payload, checksum (4).
_HEADER_BYTES, _FRAME_BYTES = 12, 16


def rollout_marker(rollout_id: int, *, step: int, wall_time: float) -> Event:
    """An event with the rollout of the events after it. Viewers ignore it."""
    log = SessionLog(status=SessionLog.CHECKPOINT, msg=f"{_MARKER}{rollout_id}")
    return Event(wall_time=wall_time, step=step, session_log=log)


def event_files(folder: Path) -> list[Path]:
    """The event files directly in `folder`, oldest first."""
    return sorted(folder.glob("*tfevents*"))


def drop_rollouts_from(folder: Path, rollout_id: int) -> None:
    """Removes the events of `rollout_id` and later from the event files of `folder`.

    Each file is replaced atomically, and a repeated call changes nothing, so it may be interrupted.
    OSError if a file cannot be read or written; StorageError if one is damaged.
    """
    for path in event_files(folder):
        records = _read(path)
        kept = _before(records, rollout_id)
        if len(kept) < len(records):
            _replace(path, kept)


def _before(records: list[bytes], rollout_id: int) -> list[bytes]:
    kept, keep = [], True
    for record in records:
        message = Event.FromString(record).session_log.msg
        if message.startswith(_MARKER):
            keep = int(message.removeprefix(_MARKER)) < rollout_id
        if keep:
            kept.append(record)
    return kept


def _read(path: Path) -> list[bytes]:
    """All records, without a last one that is incomplete because the run was killed."""
    records = list(RawEventFileLoader(str(path)).Load())
    with path.open("rb") as file:
        file.seek(sum(len(record) + _FRAME_BYTES for record in records))
        rest = file.read()
    # The loader stops at a damaged record as at an incomplete one; then later records would be lost.
    if len(rest) >= _HEADER_BYTES and struct.unpack("<Q", rest[:8])[0] + _FRAME_BYTES <= len(rest):
        raise StorageError(
            f"tracker 'tensorboard': {path} is damaged. Move it out of the folder to continue without it."
        )
    return records


def _replace(path: Path, records: list[bytes]) -> None:
    # TensorBoard ignores files without "tfevents" in their name.
    aside = path.with_name(path.name.replace("tfevents", "rewritten"))
    with aside.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
