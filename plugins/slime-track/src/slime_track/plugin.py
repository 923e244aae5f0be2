"""What the entry points name: options of the trackers."""

from __future__ import annotations

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath
from slime_core.contracts.tracker import Tracker, TrackerDriver
from slime_core.errors import PluginError


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


class Curves(TrackerDriver):
    """curves.png in the run's folder: reward and held-out accuracy over the steps."""

    @classmethod
    def build(cls, config: DriverConfig) -> Tracker:
        try:
            from slime_track.curves import CurvesTracker
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "matplotlib":
                raise
            raise PluginError(
                "tracker 'curves' draws with matplotlib, which is not installed. Say: pip install 'slime-track[plot]'"
            ) from error
        return CurvesTracker()
