"""What the entry points name: options of the trackers."""

from __future__ import annotations

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath
from slime_core.contracts.tracker import Tracker, TrackerDriver


class TensorBoardConfig(DriverConfig):
    log_dir: RunPath | None = None
    """Folder to write to instead of `tensorboard` in the run's folder, so that several runs can be compared."""
    tb_project_name: str | None = Field(None, min_length=1)
    """Folder under it for the runs of one project."""
    tb_experiment_name: str | None = Field(None, min_length=1)
    """Folder under that for this run; with log_dir by default the run's name."""


class TensorBoard(TrackerDriver):
    """Event files for TensorBoard."""

    Config = TensorBoardConfig

    @classmethod
    def build(cls, config: TensorBoardConfig) -> Tracker:
        from slime_track.tensorboard import TensorBoardTracker

        return TensorBoardTracker(
            log_dir=config.log_dir, project=config.tb_project_name, experiment=config.tb_experiment_name
        )
