"""RunFolder: the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from slime_core.controller.manifest import recorded_manifest
from slime_core.errors import CheckpointError

REQUIRED: Final = frozenset({"config", "plugins", "data", "fingerprint"})
"""Keys of every manifest."""


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
        """The manifest under current names, whichever release wrote it; None without a run. CheckpointError if it is damaged
        and the run has saved something."""
        try:
            content: dict[str, Any] = json.loads(self.manifest.read_text())
            if any(self.checkpoints.glob("step_*")) and (missing := REQUIRED - content.keys()):
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            return recorded_manifest(content)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if any(self.checkpoints.glob("step_*")):
                fix = "Restore the file, or pass another --name to train from the start"
                raise damaged(self.manifest, error, fix) from error
            # The run was killed while the file was first written: nothing had begun.
            return None


def damaged(path: Path, error: Exception, fix: str) -> CheckpointError:
    """For a file of a run folder that cannot be read as what slime wrote."""
    return CheckpointError(f"{path}: damaged: {error}. {fix}.")
