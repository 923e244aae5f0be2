"""StartFolder: the folder of a start.

A start whose fingerprint equals that of an unfinished run continues there. Where a run with the same keys is finished, or has
other plugins, data or layout, the start is refused with what to type. Another run gets a new folder, NAME or NAME-2, NAME-3,
…: nothing is ever overwritten unless asked, and no run begins again unnoticed.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.folder_lock import lock_folder
from slime_core.controller.manifest import Manifest, differences
from slime_core.controller.run_changes import Change, ChangeKind, changes_since, list_changes
from slime_core.controller.run_folder import RunFolder
from slime_core.errors import CheckpointError, ConfigError, StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options of `slime run` that decide where it starts."""

    fresh: bool = False
    resume: Path | None = None
    ckpt_step: int | None = None
    replay: Path | None = None
    """The schedule of another run, to replay."""
    accept: frozenset[ChangeKind] = frozenset()
    """Changes with which an unfinished run continues."""
    report: Callable[[str], object] = lambda line: None
    """Called with a line for the user."""
    began: float | None = None
    """When the program began, on the clock of `time.perf_counter`; None: its start counts from `start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFolder:
    """Where a start begins or continues."""

    folder: RunFolder
    earlier: Mapping[str, Any] | None = None
    """The manifest of the run that it continues."""
    accepted: Sequence[Change] = ()
    """Changes that this start accepts."""
    notes: Sequence[str] = ()
    """What the user should know, a line each."""


class EarlierRun:
    """A folder with a run, compared with a start."""

    def __init__(self, folder: RunFolder, manifest: Manifest) -> None:
        self.folder = folder
        self.found = folder.read_manifest()
        self.changes = [] if self.found is None else changes_since(self.found, manifest)
        self.kinds = {change.kind for change in self.changes}
        self.is_finished = folder.summary.exists()
        self.saved = max(CheckpointStore(folder.checkpoints, keep=1).steps(), default=0)

    @property
    def is_same(self) -> bool:
        return self.found is not None and not self.changes

    @property
    def may_continue(self) -> bool:
        """True for an unfinished run that something was saved of, and that no key makes another one."""
        keeps_keys = self.found is not None and not self.kinds & {ChangeKind.CONFIG, ChangeKind.TUNING}
        return keeps_keys and not self.is_finished and self.saved > 0

    def continued(self, manifest: Manifest, options: StartOptions) -> StartFolder:
        """ConfigError for changes that were not accepted."""
        assert self.found is not None
        refused = self.kinds - options.accept
        if options.resume is not None:
            refused -= {ChangeKind.LAYOUT, ChangeKind.TUNING}
        if refused:
            raise ConfigError(self.refusal(refused))
        before = {"python": self.found.get("python"), **self.found.get("libraries", {})}
        others = differences(before, {"python": manifest.python, **manifest.libraries})
        notes = [f"{self.folder.path} continues with other versions: {'; '.join(others)}"] if others else []
        accepted = [change for change in self.changes if change.kind in options.accept]
        return StartFolder(folder=self.folder, earlier=self.found, accepted=accepted, notes=notes)

    def refusal(self, refused: set[ChangeKind]) -> str:
        listed = list_changes(self.changes)
        if ChangeKind.CONFIG in refused:
            return (
                f"--resume {self.folder.path}: another run: {listed}. A run continues with the keys that it began with: set "
                "them back, or start a new run with another --name."
            )
        text = f"{self.folder.path}: this run is unfinished, {self.saved} steps are saved, and it began with others: {listed}."
        flags = [f"--resume {self.folder.path}"] * (ChangeKind.LAYOUT in refused)
        flags += ["--accept-changes plugins"] * (ChangeKind.PLUGINS in refused)
        if ChangeKind.DATA in refused:
            text += " A run continues only with the data that it began with: put them back."
        else:
            text += f" To continue it with what there is now, add {' '.join(flags)}."
        if ChangeKind.PLUGINS in refused:
            text += " To continue it as it was, put the old ones back."
        return f"{text} To train from the start, pass another --name, or --fresh, which removes this run."


def choose_start(manifest: Manifest, options: StartOptions) -> StartFolder:
    """Where this start begins or continues; changes nothing. ConfigError for a run that is finished, or has changes that
    were not accepted. CheckpointError if a checkpoint was named, and no unfinished run has one."""
    runs_dir, name = Path(manifest.config["runs_dir"]), manifest.config["name"]
    if options.resume is not None:
        earlier = EarlierRun(RunFolder(options.resume), manifest)
        if earlier.found is None:
            raise ConfigError(f"--resume {options.resume}: no run there (no manifest.json).")
        return earlier.continued(manifest, options)
    if options.fresh:
        return StartFolder(folder=RunFolder(runs_dir / name))
    *begun, free = folders(runs_dir, name)
    runs = [EarlierRun(folder, manifest) for folder in begun]
    if same := [earlier for earlier in runs if earlier.is_same and not earlier.is_finished]:
        return same[0].continued(manifest, options)
    if similar := [earlier for earlier in runs if earlier.is_same or earlier.may_continue]:
        if similar[-1].is_finished:
            raise ConfigError(finished(similar[-1], manifest.config["train"]))
        return similar[-1].continued(manifest, options)
    if options.accept:
        raise ConfigError(
            f"--accept-changes: no unfinished run is in {runs_dir / name} whose keys are those of this start. Pass the run to "
            f"resume: --resume {runs_dir}/NAME."
        )
    if options.ckpt_step is not None:
        raise CheckpointError(
            f"--ckpt-step {options.ckpt_step}: no unfinished run with this config, these plugins and this data is in "
            f"{runs_dir}. Pass the run to resume: --resume {runs_dir}/NAME."
        )
    return StartFolder(folder=free, notes=[note(runs[-1], free)] if runs else [])


def folders(runs_dir: Path, name: str) -> Iterator[RunFolder]:
    """The folders with runs of this name, then the first free one."""
    for number in itertools.count(1):
        folder = RunFolder(runs_dir / (name if number == 1 else f"{name}-{number}"))
        yield folder
        # A folder with checkpoints and no manifest is a run too.
        if folder.read_manifest() is None and not folder.summary.exists() and not folder.checkpoints.exists():
            return


def finished(earlier: EarlierRun, train: Mapping[str, Any]) -> str:
    path = earlier.folder.path
    try:
        done = int(json.loads(earlier.folder.summary.read_text())["steps"])
    except (ValueError, KeyError):
        done = earlier.saved
    more = f"--num-rollout {max(train.get('num_rollout') or 0, done + 1)}"
    if train.get("num_epoch") is not None:
        more = f"--num-epoch {train['num_epoch'] + 1}"
    return (
        f"{path}: this run is finished, with {done} steps. To train it longer, add for example {more} --resume {path}. To "
        "train again from the start, pass another --name, or --fresh, which removes this run."
    )


def note(earlier: EarlierRun, free: RunFolder) -> str:
    """Why a start does not use the newest folder of its name."""
    if earlier.found is None:
        return f"{earlier.folder.path} has no readable manifest.json: this run starts in {free.path}"
    path, state = earlier.folder.path, "is finished" if earlier.is_finished else f"has {earlier.saved} steps saved"
    text = f"{path} {state}, and began with others: {list_changes(earlier.changes)}. This one starts in {free.path}"
    resumes = earlier.saved and not earlier.is_finished and earlier.kinds <= {ChangeKind.LAYOUT, ChangeKind.TUNING}
    return text + f". To continue that one with these, add --resume {path}" * bool(resumes)


def newest_checkpoint(folder: RunFolder, options: StartOptions, *, checksum: bool) -> tuple[RunState, Path] | None:
    """The checkpoint from which a start in this folder continues. CheckpointError if it is missing or damaged, as far as sizes
    show it, and with `checksum` the content of its files."""
    found = CheckpointStore(folder.checkpoints, keep=1, checksum=checksum).load(options.ckpt_step)
    if options.replay is not None and found is not None:
        raise ConfigError(f"--replay-schedule: {folder.path} has begun already. Pass another --name.")
    return found


def clear_folder(folder: RunFolder) -> None:
    """Removes the folder with all its content, unless a process uses it."""
    if not folder.path.exists():
        return
    with lock_folder(folder):
        try:
            shutil.rmtree(folder.path)
        except OSError as error:
            raise StorageError(f"--fresh: {folder.path} cannot be removed: {error}.") from error
