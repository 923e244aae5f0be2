"""RunFolder: the folder of a run, and the choice of the folder at a start.

A start whose fingerprint equals that of an unfinished folder continues there. Otherwise it gets a new folder, NAME or
NAME-2, NAME-3, …: nothing is ever overwritten unless asked.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from slime_core.controller.manifest import (
    Manifest,
    deciding_plugins,
    differences,
    recorded_manifest,
    training_of,
    without,
)
from slime_core.errors import ConfigError, StorageError

SHOWN: Final = 5
"""Differences that an error names."""


class RunFolder:
    """Paths inside a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.manifest: Final = path / "manifest.json"
        self.config: Final = path / "config.toml"
        self.summary: Final = path / "summary.json"
        self.events: Final = path / "events.jsonl"
        self.traces: Final = path / "traces.jsonl"
        self.schedule: Final = path / "schedule.jsonl"
        self.attempts: Final = path / "attempts"
        self.checkpoints: Final = path / "checkpoints"
        self.rollouts: Final = path / "rollouts"
        self.train_data: Final = path / "train_data"
        self.hf: Final = path / "hf"

    def hf_of(self, role: str) -> Path:
        """The hf folder of a trained role beside the policy."""
        return self.path / f"hf-{role}"

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest under current names, whichever release wrote it; None without a run."""
        try:
            content: dict[str, Any] = json.loads(self.manifest.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            # The run was killed while the file was first written: nothing had begun.
            return None
        return recorded_manifest(content)


def choose_folder(runs_dir: Path, manifest: Manifest, name: str, *, fresh: bool, resume: Path | None) -> RunFolder:
    """The folder of this start. ConfigError if `resume` names one of another run."""
    if resume is not None:
        folder = RunFolder(resume)
        found = folder.read_manifest()
        if found is None:
            raise ConfigError(f"--resume {resume}: no run there (no manifest.json).")
        # Also with another layout, whose floating-point results differ in bits, or another learning rate.
        if (
            found["fingerprint"] != manifest.fingerprint
            and training_of(found, manifest.may_differ) != manifest.training
        ):
            raise ConfigError(f"--resume {resume}: another run: {what_differs(found, manifest)}")
        return folder
    first = RunFolder(runs_dir / name)
    if fresh:
        clear_folder(first)
        return first
    number = 1
    while True:
        folder = RunFolder(runs_dir / (name if number == 1 else f"{name}-{number}"))
        found = folder.read_manifest()
        # A folder with checkpoints and no manifest is a run too.
        if found is None and not folder.summary.exists() and not folder.checkpoints.exists():
            return folder
        if found is not None and found["fingerprint"] == manifest.fingerprint and not folder.summary.exists():
            return folder
        number += 1


def what_differs(found: Mapping[str, Any], manifest: Manifest) -> str:
    """The differences between a folder's run and this one, key by key, and the fix if only a plugin's version differs."""
    there, here = (without(config, manifest.may_differ) for config in (found["config"], manifest.config))
    then, now = deciding_plugins(found["plugins"]), deciding_plugins(manifest.plugins)
    chosen = then.keys() & now.keys()
    others = differences({where: then[where] for where in chosen}, {where: now[where] for where in chosen}, "plugins.")
    changed = differences(there, here) + others or ["data or plugins differ"]
    advice = (
        " A run continues with the plugins that it began with: install those, or start a new run with another --name."
    )
    return f"{'; '.join(changed[:SHOWN])}.{advice if others else ''}"


def clear_folder(folder: RunFolder) -> None:
    """Removes the folder with all its content, unless a process uses it."""
    if not folder.path.exists():
        return
    with lock_folder(folder):
        try:
            shutil.rmtree(folder.path)
        except OSError as error:
            raise StorageError(f"--fresh: {folder.path} cannot be removed: {error}.") from error


def lock_folder(folder: RunFolder) -> IO[str]:
    """Locks the run folder as long as the returned file is open; the system releases the lock when the process ends."""
    return lock(
        folder.path,
        busy="this run is running in another process. Wait for it, or give this one a --name.",
        elsewhere="Pass --runs-dir for another place.",
    )


def lock(folder: Path, *, busy: str, elsewhere: str) -> IO[str]:
    """Locks any folder. `busy`: the error if another process holds the lock; `elsewhere`: the fix if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error}. {elsewhere}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ConfigError(f"{folder}: {busy}") from None
    return handle
