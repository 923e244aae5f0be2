"""RunFolder: the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from slime_core.controller.manifest import recorded_manifest


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
