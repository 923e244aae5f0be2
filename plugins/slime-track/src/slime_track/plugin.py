"""Drivers of slime-track: the trackers, and their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath
from slime_core.contracts.tracker import Tracker, TrackerDriver
from slime_core.errors import PluginError


class TensorBoardConfig(DriverConfig):
    log_dir: RunPath | None = None
    """Folder for the events instead of `tensorboard` in the run's folder, to compare several runs."""
    tb_project_name: str | None = Field(None, min_length=1)
    """Subfolder for the runs of a project."""
    tb_experiment_name: str | None = Field(None, min_length=1)
    """Subfolder for this run; with log_dir by default the run's name."""


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
        with installed("curves", "matplotlib", "plot"):
            from slime_track.curves import CurvesTracker
        return CurvesTracker()


class WandbConfig(DriverConfig):
    wandb_mode: Literal["online", "offline", "disabled"] = "offline"
    """offline: write files that `wandb sync` uploads later; online: send to the server at once; disabled: log nothing."""
    wandb_dir: RunPath | None = None
    """Folder for W&B's own files; by default the run's folder."""
    wandb_key_file: RunPath | None = None
    """File with the API key; by default the one that `wandb login` has stored."""
    wandb_host: str | None = None
    """Address of your own server."""
    wandb_team: str | None = None
    """Team or user; by default yours."""
    wandb_project: str = Field("slime", min_length=1)
    """Project."""
    wandb_group: str | None = None
    """Group of runs."""
    wandb_run_id: str | None = None
    """Id of the run; by default a new one, which the run's folder keeps for a resumed run."""
    disable_wandb_random_suffix: bool = False
    """Use only the run's name, without the id."""
    wandb_always_use_train_step: bool = False
    """Plot all metrics over the number of optimizer steps."""


class Wandb(TrackerDriver):
    """Weights & Biases, online or offline."""

    Config = WandbConfig

    @classmethod
    def build(cls, config: WandbConfig) -> Tracker:
        with installed("wandb", "wandb", "wandb"):
            from slime_track.wandb import WandbSettings, WandbTracker
        return WandbTracker(
            WandbSettings(
                mode=config.wandb_mode,
                folder=None if config.wandb_dir is None else Path(config.wandb_dir),
                key_file=None if config.wandb_key_file is None else Path(config.wandb_key_file),
                host=config.wandb_host,
                team=config.wandb_team,
                project=config.wandb_project,
                group=config.wandb_group,
                run_id=config.wandb_run_id,
                random_suffix=not config.disable_wandb_random_suffix,
                always_use_train_step=config.wandb_always_use_train_step,
            )
        )


class MlflowConfig(DriverConfig):
    tracking_uri: str | None = None
    """Server or database (`http://…`, `sqlite:///…`); by default the file mlflow.db in the run's folder."""
    experiment: str = Field("slime", min_length=1)
    """Name of the experiment, which is created if it is missing."""
    run_name: str | None = None
    """Name of the run; by default the name in the run file."""


class Mlflow(TrackerDriver):
    """MLflow: a server, or a database file in the run's folder."""

    Config = MlflowConfig

    @classmethod
    def build(cls, config: MlflowConfig) -> Tracker:
        with installed("mlflow", "mlflow", "mlflow"):
            from slime_track.mlflow import MlflowTracker
        return MlflowTracker(tracking_uri=config.tracking_uri, experiment=config.experiment, run_name=config.run_name)


@contextmanager
def installed(tracker: str, package: str, extra: str) -> Iterator[None]:
    """Raises a PluginError with the command to type if the tracker's package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise PluginError(
            f"tracker {tracker!r} requires {package}, which is not installed. Run: pip install 'slime-track[{extra}]'"
        ) from error
