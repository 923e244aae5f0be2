"""Dumps: which steps of a set have files of groups, and of the trainer's columns."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from slime_core.controller.run_folder import RunFolder
from slime_core.data.table import dump_file, dumped_steps
from slime_core.data.train_data import train_data_file
from slime_viewer.sample_numbers import StepFile
from slime_viewer.view_folder import TRAIN, ViewFolder


def sample_sets(folder: Path) -> list[str]:
    """`train` if there are such files, then evaluation sets by name."""
    view = ViewFolder(folder)
    evals = sorted(unquote(path.name) for path in view.evals.iterdir()) if view.evals.is_dir() else []
    found = [TRAIN] if any(dumped_steps(place) for place in train_places(folder)) else []
    return found + [name for name in evals if dumped_steps(view.eval_set(name))]


def train_places(folder: Path) -> list[Path]:
    """Folders of files of groups. A step that several have is read from the first."""
    return [RunFolder(folder).rollouts, ViewFolder(folder).groups, folder]


def step_files(folder: Path, name: str) -> dict[int, StepFile]:
    """By step, in order. Files that vanish meanwhile are left out."""
    view = ViewFolder(folder)
    places = train_places(folder) if name == TRAIN else [view.eval_set(name)]
    found: dict[int, StepFile] = {}
    for place in reversed(places):
        for step in dumped_steps(place):
            groups = dump_file(place, step)
            trainers = [dump_file(view.tokens, step), train_data_file(RunFolder(folder).train_data, step)]
            there = [(path, key) for path in trainers if name == TRAIN and (key := file_key(path))]
            tokens, of_tokens = there[0] if there else (None, "")
            if (of_groups := file_key(groups)) is not None:
                key = f"{of_groups}-{of_tokens}" if tokens else of_groups
                found[step] = StepFile(step=step, groups=groups, tokens=tokens, key=key)
    return dict(sorted(found.items()))


def file_key(path: Path) -> str | None:
    """Of its time and size; None if it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_mtime_ns:x}.{status.st_size:x}"
