"""Checkpoints: atomic, verified run state. Written to a temporary folder, synced, marked complete, renamed. A run resumes
from the newest complete one."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from slime_core.atomic_io.atomic_file import sync
from slime_core.atomic_io.checksum import checksums
from slime_core.atomic_io.storage import is_full, storage_error
from slime_core.errors import CheckpointError

COMPLETE: Final = "COMPLETE"
STATE_FILE: Final = "state.json"
FORMAT: Final = 2
"""2: trainer/ has a folder for each trained role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The driver's own part of a checkpoint; the buffer and the trainers write theirs beside it."""

    rollout_id: int = 0
    """The next rollout step to train: steps below it are done."""
    version: int = 0
    """Policy version: one more for each rollout batch trained."""
    optimizer_steps: int = 0
    next_collect: int = 0
    """The next rollout step to collect; those from rollout_id up to it are in the checkpoint as accepted groups."""
    tokens: int = 0
    """Tokens trained on so far."""
    seconds: float = 0.0
    """Wall time of all attempts up to here."""
    eval_before: Mapping[str, float] = field(default_factory=dict)
    """Accuracy on each evaluation set before the first step; empty if that was not evaluated."""
    eval_owed: bool = False
    """An evaluation that was due has not ended. A run that resumes from here evaluates first, with the weights it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    aside: Path
    final: Path
    """Where it will be when it is complete."""


@contextlib.contextmanager
def discard_on_error(unfinished: PendingCheckpoint) -> Iterator[None]:
    """Removes the folder if the body raises; StorageError if the disk is the reason."""
    try:
        yield
    except Exception as error:
        # Checked before the half-written files are removed, which frees their space.
        storage = isinstance(error, OSError) or is_full(unfinished.final, error)
        refused = storage_error(unfinished.final, error) if storage else None
        shutil.rmtree(unfinished.aside, ignore_errors=True)
        if refused is not None:
            raise refused from error
        raise


class CheckpointStore:
    """The checkpoints/ folder of a run."""

    def __init__(self, folder: Path, *, keep: int, checksum: bool = True) -> None:
        """`checksum`: see `checkpoint.checksum`."""
        self._folder = folder
        self._keep = keep
        self._checksum = checksum

    async def begin(self, state: RunState, write: Callable[[Path], Awaitable[None]]) -> PendingCheckpoint:
        """`write` fills the folder that it is given; nothing counts as saved before `complete`. One at a time. StorageError
        if there is no space left; earlier checkpoints stay as they are."""
        unfinished = PendingCheckpoint(
            aside=self._folder / f".step_{state.rollout_id}.writing", final=self._folder / f"step_{state.rollout_id}"
        )
        with discard_on_error(unfinished):
            self.sweep()
            unfinished.aside.mkdir(parents=True)
            await write(unfinished.aside)
            (unfinished.aside / STATE_FILE).write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=1))
        return unfinished

    def complete(self, unfinished: PendingCheckpoint) -> Path:
        """Marks a fully written checkpoint complete. Waits for the disk, so it may be called in a thread."""
        aside, final = unfinished.aside, unfinished.final
        with discard_on_error(unfinished):
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            for path in [*files, *(path for path in aside.rglob("*") if path.is_dir())]:
                sync(path)
            sums: list[str | None] = [*checksums(files)] if self._checksum else [None] * len(files)
            written = {
                str(path.relative_to(aside)): {"size": path.stat().st_size, "crc32": crc32}
                for path, crc32 in zip(files, sums, strict=True)
            }
            (aside / COMPLETE).write_text(json.dumps(written, indent=1))
            sync(aside / COMPLETE)
            sync(aside)
            remove(final)
            aside.rename(final)
            sync(self._folder)
        self._forget_old()
        return final

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        numbers = (path.parent.name.removeprefix("step_") for path in self._folder.glob(f"step_*/{COMPLETE}"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def load(self, step: int | None = None) -> tuple[RunState, Path] | None:
        """The newest complete checkpoint (or that of `step`), verified; None if there is none."""
        steps = self.steps()
        if step is not None and step not in steps:
            there = f"pass one of {', '.join(map(str, steps))}" if steps else "this folder has none yet"
            raise CheckpointError(f"{self._folder}: no complete checkpoint of step {step}; {there}.")
        if not steps:
            return None
        folder = self._folder / f"step_{steps[-1] if step is None else step}"
        self._verify(folder, steps)
        state = json.loads((folder / STATE_FILE).read_text())
        if (found := state.pop("format")) != FORMAT:
            raise CheckpointError(f"{folder}: written in format {found}; this slime reads format {FORMAT}.")
        return RunState(**state), folder

    def set_aside_after(self, step: int) -> None:
        """Keeps checkpoints beyond `step` under another name: the run that resumes from it has not made them."""
        for later in self.steps():
            if later > step:
                self._set_aside(later)
        sync(self._folder)

    def _set_aside(self, step: int) -> None:
        aside = self._folder / f"set_aside_step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / f"step_{step}").rename(aside)

    def _verify(self, folder: Path, steps: list[int]) -> None:
        """Raises CheckpointError unless every file is as it was written."""
        older = [step for step in steps if step < int(folder.name.removeprefix("step_"))]
        way_out = f"Start from an older one with --ckpt-step {older[-1]}" if older else "Start over with --fresh"
        try:
            # 0.2 wrote the size alone.
            written = {
                folder / name: entry if isinstance(entry, dict) else {"size": entry, "crc32": None}
                for name, entry in json.loads((folder / COMPLETE).read_text()).items()
            }
            summed = [path for path, entry in written.items() if entry["crc32"] is not None]
            sizes = {path: int(entry["size"]) for path, entry in written.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder}: damaged: {COMPLETE} cannot be read: {error}. {way_out}.") from error
        if folder / STATE_FILE not in sizes:
            raise CheckpointError(f"{folder}: damaged: {COMPLETE} lists no {STATE_FILE}. {way_out}.")
        for path, size in sizes.items():
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                found = "is missing" if actual is None else f"has {actual} of {size} bytes"
                raise CheckpointError(f"{folder}: cut short: {path.relative_to(folder)} {found}. {way_out}.")
        for path, crc32 in zip(summed, checksums(summed) if self._checksum else (), strict=self._checksum):
            if crc32 != written[path]["crc32"]:
                raise CheckpointError(
                    f"{folder}: damaged: {path.relative_to(folder)} is not what was written (CRC-32 {crc32}, not "
                    f"{written[path]['crc32']}). {way_out}."
                )

    def sweep(self) -> None:
        """Removes incomplete checkpoints; called when none is being written."""
        half_removed = [path for path in self._folder.glob("step_*") if not (path / COMPLETE).exists()]
        for left_over in [*self._folder.glob(".step_*.writing"), *half_removed]:
            shutil.rmtree(left_over, ignore_errors=True)

    def _forget_old(self) -> None:
        for step in self.steps()[: -self._keep]:
            remove(self._folder / f"step_{step}")


def remove(checkpoint: Path) -> None:
    """The marker goes first, so that a half-removed checkpoint is never taken for a complete one."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
