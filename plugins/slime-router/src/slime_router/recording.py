"""Recording: requests and responses in a file, one line of JSON each, found by the content of the request."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from slime_core.errors import DataError, StorageError
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_core.types.routed_experts import narrow
from slime_core.types.sample import VersionSpan
from slime_router.wire import WireCompletion, WireRequest

NONE: Final = msgspec.Raw(b"null")


class Keyed(msgspec.Struct):
    """The field of every line that is read at the start."""

    key: str


class Line(msgspec.Struct):
    """One request and its response: SGLang's `body` if it came over HTTP, else `completion`."""

    key: str
    request: dict[str, Any]
    completion: dict[str, Any] | None = None
    body: msgspec.Raw = NONE
    engine_index: int = 0


key_decoder: Final = msgspec.json.Decoder(Keyed)
line_decoder: Final = msgspec.json.Decoder(Line)


def key_of(request: GenerateRequest) -> str:
    """Hash of a request: prompt and images, sampling, seed, requested expert ids, adapter, and all other fields that came over
    HTTP. The request's id is not part of it, because a retry changes it."""
    asked: list[Any] = [request.text, request.token_ids.tolist(), asdict(request.sampling), request.seed]
    if request.routed_experts_from is not None:
        asked.append(request.routed_experts_from)
    if request.adapter is not None:
        asked.append({"adapter": request.adapter})
    if request.images:
        asked.append([[xxhash.xxh3_128_hexdigest(image.data), image.places, image.frames] for image in request.images])
    if isinstance(request, WireRequest) and (unread := request.unread):
        asked.append(unread)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(asked))


class RecordingWriter:
    """Appends to the file. When `add` returns, the line has been passed to the operating system."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from None

    def add(self, request: GenerateRequest, completion: Completion) -> None:
        line: dict[str, Any] = {
            "key": key_of(request),
            "request": {
                "request_id": request.request_id,
                "session_id": request.session_id,
                "text": request.text,
                "token_ids": request.token_ids.tolist(),
                "sampling": asdict(request.sampling),
                "seed": request.seed,
            },
            "engine_index": completion.engine_index,
        }
        if isinstance(completion, WireCompletion):
            line["body"] = one_line(completion.body)
        else:
            line["completion"] = as_json(completion)
        data = msgspec.json.encode(line) + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            raise StorageError(f"{self._path}: a response could not be recorded: {error.strerror}") from None
        if written != len(data):
            raise StorageError(f"{self._path}: a response could not be recorded: the disk took only a part of it")


class RecordingReader:
    """Finds recorded responses. Only positions in the file are kept in memory. Raises DataError for an invalid line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: defaultdict[str, deque[tuple[int, int, int]]] = defaultdict(deque)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be replayed: {error.strerror}") from None
        start = 0
        for number, line in enumerate(self._file, 1):
            # A killed recording may end with an incomplete line. It is ignored, so its request has no response.
            if line.endswith(b"\n"):
                try:
                    self._places[key_decoder.decode(line).key].append((number, start, len(line)))
                except msgspec.MsgspecError as error:
                    raise DataError(f"{path}:{number}: not a recorded response: {error}") from None
            start += len(line)

    def take(self, request: GenerateRequest) -> Completion | None:
        """The next recorded response to an equal request, in recorded order; each is returned once. None: none left."""
        places = self._places.get(key_of(request))
        if not places:
            return None
        number, start, length = places.popleft()
        self._file.seek(start)
        try:
            line = line_decoder.decode(self._file.read(length))
            if bytes(line.body) != b"null":
                return WireCompletion.of(
                    [bytes(line.body)], request_id=request.request_id, engine_index=line.engine_index
                )
            return from_json(line.completion or {}, request.request_id, line.engine_index)
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            raise DataError(f"{self._path}:{number}: not a recorded response: {error}") from None


def one_line(body: bytes) -> msgspec.Raw:
    """The body as one line. JSON has line breaks only between tokens, where they have no meaning."""
    return msgspec.Raw(body.replace(b"\n", b" ").replace(b"\r", b" "))


def as_json(completion: Completion) -> Mapping[str, Any]:
    prompt, experts = completion.prompt_token_ids, completion.routed_experts
    return {
        "token_ids": completion.token_ids.tolist(),
        "log_probs": completion.log_probs.tolist(),
        "finish_reason": completion.finish_reason.value,
        "spans": completion.spans,
        "cached_tokens": completion.cached_tokens,
        "extra": completion.extra,
        "prompt_token_ids": None if prompt is None else prompt.tolist(),
        "routed_experts": None if experts is None else experts.tolist(),
    }


def from_json(fields: Mapping[str, Any], request_id: str, engine_index: int) -> Completion:
    prompt = fields["prompt_token_ids"]
    # NaN, where an engine gave no log-probs, is null in JSON.
    experts = fields.get("routed_experts")
    log_probs = [np.nan if value is None else value for value in fields["log_probs"]]
    return Completion(
        request_id=request_id,
        token_ids=np.array(fields["token_ids"], np.int32),
        log_probs=np.array(log_probs, np.float32),
        finish_reason=FinishReason(fields["finish_reason"]),
        spans=tuple(VersionSpan(*span) for span in fields["spans"]),
        cached_tokens=fields["cached_tokens"],
        engine_index=engine_index,
        extra=dict(fields["extra"]),
        prompt_token_ids=None if prompt is None else np.array(prompt, np.int32),
        routed_experts=None if experts is None else narrow(np.array(experts, np.int64)),
    )
