"""Tracker wandb: sends metrics to Weights & Biases, or writes files that `wandb sync` uploads later."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import wandb
from wandb.errors import Error as WandbError

from slime_core.algorithm.metrics import EVAL_AXIS, ROLLOUT_AXIS, TRAIN_AXIS
from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.errors import ConfigError, StorageError

RUN_ID: Final = "wandb_run_id"
"""File in the run's folder with the id."""
AXES: Final = {"train/*": TRAIN_AXIS, "rollout/*": ROLLOUT_AXIS, "perf/*": ROLLOUT_AXIS, "eval/*": EVAL_AXIS}


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """Options, see WandbConfig."""

    mode: Literal["online", "offline", "disabled"]
    folder: Path | None
    key_file: Path | None
    host: str | None
    team: str | None
    project: str
    group: str | None
    run_id: str | None
    random_suffix: bool
    always_use_train_step: bool


class WandbTracker(Tracker):
    """Each axis is logged as a metric, over which its metrics are plotted. W&B's own step only counts calls."""

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._run: Any = None
        self._rollouts: tuple[int, int] = (1, 1)

    def start(self, run: RunInfo) -> None:
        """ConfigError if W&B refuses the run, for example because of the key."""
        given, found = self._settings, run.run_dir / RUN_ID
        known = found.read_text(encoding="utf-8").strip() if found.is_file() else None
        run_id = given.run_id or known or secrets.token_hex(4)
        suffix = f"-{run_id}" if given.random_suffix else ""
        self._rollouts = rollouts_of(run.config)
        try:
            if given.mode == "online" and given.key_file is not None:
                wandb.login(key=given.key_file.read_text(encoding="utf-8").strip(), host=given.host)
            self._run = wandb.init(
                project=given.project,
                entity=given.team,
                group=given.group,
                id=run_id,
                name=f"{run.name}{suffix}",
                config=dict(run.config),
                dir=given.folder or run.run_dir,
                mode=given.mode,
                resume="allow" if given.mode == "online" else None,
                # The user may have another run in the same process.
                reinit="create_new",
                settings=settings_of(given),
            )
            found.write_text(run_id, encoding="utf-8")
            for metrics, axis in AXES.items():
                self._run.define_metric(axis, hidden=True)
                self._run.define_metric(metrics, step_metric=TRAIN_AXIS if given.always_use_train_step else axis)
        except WandbError as error:
            raise ConfigError(
                f"tracker 'wandb': {error}. To log without a connection, set wandb_mode = \"offline\"."
            ) from error
        except OSError as error:
            raise StorageError(f"tracker 'wandb': {error}.") from error

    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        assert self._run is not None, "start() comes first"
        if self._settings.always_use_train_step and axis != TRAIN_AXIS:
            per_rollout, per_step = self._rollouts
            axis, step = TRAIN_AXIS, step * per_rollout // per_step
        self._run.log({**metrics, axis: step})

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def rollouts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """(rollouts per rollout step, rollouts per optimizer step)."""
    rollout = config.get("rollout", {})
    made = rollout.get("rollout_batch_size", 1) * rollout.get("n_samples_per_prompt", 1)
    return made, config.get("train", {}).get("global_batch_size") or made


def settings_of(given: WandbSettings) -> Any:
    """Settings that send only what the tracker logs, and nothing about the machine or the code."""
    return wandb.Settings(
        base_url=given.host or "https://api.wandb.ai",
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        save_code=False,
    )
