"""`slime convert`: the pieces of a conversion over worker processes, a journal of what is done, and the comparison at the end.

The folder TARGET.converting holds `journal.jsonl` (what is converted, then a line for each finished piece), `pieces/` and
`target/`, which becomes TARGET when everything in it has been read back.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from slime_core.atomic_io.storage import storage_errors
from slime_core.config.part import BoundPlugin, PluginSpec
from slime_core.contracts.converter import Checksums, Converter, Shard
from slime_core.controller.folder_lock import lock
from slime_core.errors import ModelError
from slime_core.registry import Registry

JOURNAL: Final = "journal.jsonl"
SHOWN: Final = 5
Report = Callable[[str, int, int], None]
"""Progress: the task ("converting", "comparing"), bytes done, bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    target: Path
    num_pieces: int
    num_resumed: int
    """Pieces that an earlier start had finished."""
    num_tensors: int


def convert(part: BoundPlugin, source: Path, target: Path, *, workers: int, report: Report) -> Converted:
    """ModelError if the source cannot be converted, if TARGET is there already, or if what is read back differs."""
    if target.exists():
        raise ModelError(f"{target}: exists already. Remove it, or give another name.")
    work = target.with_name(f"{target.name}.converting")
    pieces = part.build().pieces(source)
    busy = "another process converts into it. Wait for that one."
    with lock(work, busy=busy, elsewhere="Give another TARGET."), storage_errors(work):
        journal = Journal.of(work / JOURNAL, identity_of(part, source, pieces))
        with nothing_left(work, journal):
            return convert_pieces(part, source, target, work, pieces, journal, workers=workers, report=report)


@contextmanager
def nothing_left(work: Path, journal: Journal) -> Iterator[None]:
    """Removes the work folder of a conversion that fails before a piece of it is done."""
    try:
        yield
    except BaseException:
        if not journal.done:
            shutil.rmtree(work, ignore_errors=True)
        raise


def convert_pieces(
    part: BoundPlugin,
    source: Path,
    target: Path,
    work: Path,
    pieces: Sequence[Shard],
    journal: Journal,
    *,
    workers: int,
    report: Report,
) -> Converted:
    folders = {piece.name: work / "pieces" / piece.name for piece in pieces}
    todo = [piece for piece in pieces if piece.name not in journal.done]
    with Workers(part, source, workers) as pool:
        for piece in todo:
            shutil.rmtree(folders[piece.name], ignore_errors=True)
            folders[piece.name].mkdir(parents=True)
        for piece, checksums in pool.each("write", "converting", todo, pieces, folders, report):
            journal.add(piece, checksums)
        (work / "target").mkdir(exist_ok=True)
        part.build().finish(source, folders, work / "target")
        everywhere = dict.fromkeys(folders, work / "target")
        found = dict(pool.each("read_back", "comparing", pieces, pieces, everywhere, report))
    compare(journal.done.values(), found.values(), work)
    (work / "target").rename(target)
    shutil.rmtree(work)
    return Converted(
        target=target,
        num_pieces=len(pieces),
        num_resumed=len(pieces) - len(todo),
        num_tensors=sum(len(checksums) for checksums in found.values()),
    )


def identity_of(part: BoundPlugin, source: Path, pieces: Sequence[Shard]) -> dict[str, Any]:
    """Equal: what an earlier start has done is of use."""
    files = sorted(file for file in source.rglob("*") if file.is_file())
    return {
        "converter": f"{part.entry.qualified} {part.entry.version}",
        "options": part.config.model_dump(mode="json"),
        "source": str(source.resolve()),
        "files": {str(file.relative_to(source)): [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
        "pieces": [piece.name for piece in pieces],
    }


class Journal:
    """Finished pieces with their checksums; a line is on the disk before the next piece counts."""

    def __init__(self, path: Path, done: dict[str, Checksums]) -> None:
        self._path = path
        self.done = done

    @classmethod
    def of(cls, path: Path, identity: Mapping[str, Any]) -> Journal:
        """What an earlier start left; ModelError if that was another conversion."""
        # A line that a killed process had half written is no line.
        whole = path.read_text().splitlines(keepends=True) if path.is_file() else []
        lines = [json.loads(line) for line in whole if line.endswith("\n")]
        if len(lines) > 1 and lines[0] != identity:
            changed = sorted(key for key in identity if lines[0].get(key) != identity[key])
            raise ModelError(
                f"{path.parent}: holds an unfinished conversion with other {' and '.join(changed)}. Remove that folder to "
                "start over."
            )
        journal = cls(path, {line["piece"]: line["checksums"] for line in lines[1:]})
        if len(lines) != len(whole) or len(lines) < 2:
            path.write_text("".join(json.dumps(line) + "\n" for line in [identity, *lines[1:]]))
        return journal

    def add(self, piece: Shard, checksums: Checksums) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"piece": piece.name, "checksums": dict(checksums)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done[piece.name] = dict(checksums)


class Workers:
    """Processes that have built the converter."""

    def __init__(self, part: BoundPlugin, source: Path, count: int) -> None:
        self._source = source
        self._spec = part.spec().to_json()
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(
        self,
        what: str,
        task: str,
        todo: Sequence[Shard],
        pieces: Sequence[Shard],
        folders: Mapping[str, Path],
        report: Report,
    ) -> Iterator[tuple[Shard, Checksums]]:
        """Yields (piece, checksums) as pieces are finished; calls `report` at the start and after each."""
        total = sum(piece.num_bytes for piece in pieces)
        so_far = total - sum(piece.num_bytes for piece in todo)
        report(task, so_far, total)
        running: dict[Future[Checksums], Shard] = {
            self._pool.submit(call, self._spec, what, self._source, piece, folders[piece.name]): piece for piece in todo
        }
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                piece = running.pop(future)
                yield piece, future.result()
                so_far += piece.num_bytes
                report(task, so_far, total)


@cache
def converter_of(spec: str) -> Converter:
    """One for each process."""
    converter: Converter = PluginSpec.from_json(spec).resolve(Registry.from_environment()).build()
    return converter


def call(spec: str, what: str, source: Path, piece: Shard, folder: Path) -> Checksums:
    converter = converter_of(spec)
    if what == "write":
        return converter.write(source, piece, folder)
    return converter.read_back(source, piece, folder)


def compare(written: Iterable[Checksums], found: Iterable[Checksums], work: Path) -> None:
    expected = {name: checksum for checksums in written for name, checksum in checksums.items()}
    there = {name: checksum for checksums in found for name, checksum in checksums.items()}
    different = sorted(name for name in expected.keys() | there.keys() if expected.get(name) != there.get(name))
    if different:
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise ModelError(
            f"{work / 'target'}: what is read back is not what was written: {', '.join(different[:SHOWN])}{more}. Is the disk "
            f"sound? Remove {work} to start over."
        )
