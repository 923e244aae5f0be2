"""Images and videos of a row: read from what a data file holds, and given their places in its messages."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from slime_core.errors import DataError
from slime_core.types.image import Image
from slime_core.types.prompt import Message
from slime_models.media.image_processor import read_image

if TYPE_CHECKING:
    from slime_models.media.video_reader import VideoReader

Kind: TypeAlias = Literal["image", "video"]
PLACEHOLDERS: Final[Mapping[str, Kind]] = {"<image>": "image", "<video>": "video"}
"""Where one belongs in a message's text."""
LONGEST_PATH: Final = 4096
"""A longer string is no path."""


def entries(row: Mapping[str, Any], key: str, kind: str) -> Iterator[tuple[str, Any]]:
    """What the column holds, one or a list, each with its place for messages."""
    value = row.get(key)
    if value is None:
        return
    for number, entry in enumerate(value if isinstance(value, list | tuple) else [value]):
        yield f'{kind} {number} of "{key}"', entry


def row_images(row: Mapping[str, Any], key: str, origin: str, folder: Path | None) -> tuple[Image, ...]:
    """The images in column `key`: one, or a list. DataError names the row, and the image that cannot be read."""
    images = []
    for place, entry in entries(row, key, f"{origin}: image"):
        data, name = encoded(entry, place, folder)
        images.append(read_image(data, f"{place}{name}"))
    return tuple(images)


def row_videos(
    row: Mapping[str, Any], key: str, origin: str, folder: Path | None, reader: VideoReader
) -> tuple[Image, ...]:
    """The videos in column `key`: one, or a list; each a file, given as an image is, or its frames: a list of images, or an
    object with `frames` and `fps`. DataError names the row, and the video that cannot be read."""
    videos = []
    for place, entry in entries(row, key, f"{origin}: video"):
        held = entry if isinstance(entry, Mapping) and "frames" in entry else {"frames": entry}
        if not isinstance(held["frames"], list | tuple):
            data, name = encoded(entry, place, folder)
            videos.append(reader.read_file(data, f"{place}{name}"))
            continue
        fps = held.get("fps")
        if fps is not None and not (isinstance(fps, int | float) and fps > 0):
            raise DataError(f'{place}: "fps" must be a positive number, found {fps!r}')
        frames = [encoded(frame, f"{place}, frame {at}", folder)[0] for at, frame in enumerate(held["frames"])]
        videos.append(reader.read_frames(frames, place, fps))
    return tuple(videos)


def encoded(entry: Any, place: str, folder: Path | None) -> tuple[bytes, str]:
    """The bytes of one image, and what to call it beside its place."""
    if isinstance(entry, Mapping):
        # As the datasets library writes them.
        given = entry.get("bytes") if entry.get("bytes") is not None else entry.get("path")
        if given is None:
            raise DataError(
                f'{place}: an object with neither "bytes" nor "path"; it has {", ".join(entry) or "no keys"}'
            )
        entry = given
    if isinstance(entry, bytes | bytearray):
        return bytes(entry), ""
    if not isinstance(entry, str) or not entry:
        raise DataError(
            f"{place}: a path, bytes, base64, a data URL or an object with bytes or path; found {entry!r:.60}"
        )
    if entry.startswith("data:"):
        head, comma, body = entry.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{place}: a data URL must contain ;base64; found {entry[:40]!r}")
        return from_base64(body, place), ""
    if "://" in entry[:16] and not entry.startswith("file://"):
        raise DataError(f"{place}: {entry[:100]}: images are read from files alone; download it, and name the file")
    path = Path(entry.removeprefix("file://"))
    if folder is not None and not path.is_absolute():
        path = folder / path
    if len(entry) <= LONGEST_PATH:
        try:
            return path.read_bytes(), f" ({path})"
        except (OSError, ValueError) as error:
            if Path(entry).suffix or not looks_like_base64(entry):
                raise DataError(f"{place}: {path} cannot be read: {error}") from error
    return from_base64(entry, place), ""


def looks_like_base64(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) > 0
    except binascii.Error:
        return False


def from_base64(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place}: neither a path nor valid base64: {error}") from error


def with_images(messages: Sequence[Message], held: Mapping[Kind, int], origin: str) -> list[Message]:
    """The messages with a content part for every image and video: where `<image>` or `<video>` is in a text, or where a
    part of that type already is. `held`: how many there are, of kinds that have a column. DataError if there are not exactly
    as many places."""
    marks = {mark: kind for mark, kind in PLACEHOLDERS.items() if kind in held}
    placed: list[Message] = [
        {**message, "content": parts_of(message.get("content"), marks, origin)} for message in messages
    ]
    for mark, kind in marks.items():
        places = sum(
            part.get("type") == kind for m in placed if isinstance(m["content"], list) for part in m["content"]
        )
        if places != held[kind]:
            raise DataError(
                f"{origin}: {held[kind]} {kind}s, and {places} places for them in the messages: write {mark} where each "
                "belongs"
            )
    return placed


def parts_of(content: Any, marks: Mapping[str, Kind], origin: str) -> Any:
    """A text without a mark stays a text: templates differ in what they make of a list of parts."""
    if isinstance(content, str):
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", content)
        if len(pieces) == 1:
            return content
        return [{"type": marks[one]} if one in marks else {"type": "text", "text": one} for one in pieces if one]
    if isinstance(content, list):
        kinds = set(marks.values())
        held = [part for part in content if isinstance(part, Mapping) and part.get("type") in kinds and len(part) > 1]
        if held:
            raise DataError(
                f"{origin}: a message holds an {held[0]['type']} itself ({', '.join(held[0])}): write "
                f'{{"type": "{held[0]["type"]}"}} there, and put it into the column that --multimodal-keys names'
            )
    return content
