"""ViewFolder: `view/` in a run folder, what slime-viewer writes there beside the run's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import quote

TRAIN: Final = "train"
"""The name of the set of samples that are trained on; others are evaluation sets."""


class ViewFolder:
    """Paths. Files of steps are named by `slime_core.data.table.dump_file`."""

    def __init__(self, run_folder: Path) -> None:
        self.path: Final = run_folder / "view"
        self.groups: Final = self.path / "groups"
        """Each step's groups, of runs without --dump-rollouts; the same tables."""
        self.tokens: Final = self.path / "tokens"
        """Each step's columns of the trainer, a row for each sample, in the order of the groups."""
        self.evals: Final = self.path / "evals"
        """A folder for each evaluation set."""
        self.times: Final = self.path / "times.jsonl"
        """When what began and ended."""
        self.plan: Final = self.path / "plan.json"
        """What `slime plan --json` printed for the run."""
        self.indices: Final = self.path / "index"

    def eval_set(self, name: str) -> Path:
        return self.evals / file_name(name)

    def index(self, name: str) -> Path:
        """`name`: of the set."""
        return self.indices / ("train" if name == TRAIN else f"eval-{file_name(name)}")


def file_name(name: str) -> str:
    """A name as the name of a file: letters, digits, `_`, `-`, `.` as they are, others as %XX: every name has its own."""
    return quote(name, safe="").replace(".", "%2E") if name in (".", "..") else quote(name, safe="")
