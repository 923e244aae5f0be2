"""Tracker mlflow: logs metrics to an MLflow server or to a database file."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service.utils import _get_store

from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.errors import ConfigError, StorageError

RUN_ID: Final = "mlflow_run_id"
"""File in the run's folder with the id."""
DATABASE: Final = "mlflow.db"
AT_ONCE: Final = 1000
"""Largest number of metrics in one call of MLflow; of parameters it is 100."""
LONGEST: Final = 500
"""Longest parameter, in characters."""


class MlflowTracker(Tracker):
    """One MLflow run for each run, also after a resume: repeated steps are logged again, and the last values are shown."""

    def __init__(self, *, tracking_uri: str | None, experiment: str, run_name: str | None) -> None:
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._uri = ""

    def start(self, run: RunInfo) -> None:
        """ConfigError if the server cannot be reached."""
        self._uri = uri = self._tracking_uri or f"sqlite:///{run.run_dir / DATABASE}"
        found = run.run_dir / RUN_ID
        try:
            self._client = client = MlflowClient(tracking_uri=uri)
            if found.is_file():
                self._run_id = found.read_text(encoding="utf-8").strip()
                client.update_run(self._run_id, status="RUNNING")
                return
            experiment = client.get_experiment_by_name(self._experiment)
            number = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
            self._run_id = client.create_run(number, run_name=self._run_name or run.name).info.run_id
            params = [Param(allowed(key), value[:LONGEST]) for key, value in flat(run.config)]
            for some in batches(params, 100):
                client.log_batch(self._run_id, params=some)
            found.write_text(self._run_id, encoding="utf-8")
        except MlflowException as error:
            raise ConfigError(f"tracker 'mlflow': {uri}: {error}.") from error
        except OSError as error:
            raise StorageError(f"tracker 'mlflow': {error}.") from error

    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        assert self._client is not None, "start() comes first"
        now = int(time.time() * 1000)
        values = [Metric(allowed(name), float(value), now, step) for name, value in metrics.items()]
        try:
            for some in batches(values, AT_ONCE):
                self._client.log_batch(self._run_id, metrics=some)
        except MlflowException as error:
            raise StorageError(f"tracker 'mlflow': cannot log step {step} of {axis}: {error}.") from error

    def finish(self) -> None:
        if self._client is None or not self._run_id:
            return
        client, self._client = self._client, None
        try:
            client.set_terminated(self._run_id)
        except MlflowException as error:
            raise StorageError(f"tracker 'mlflow': cannot end run {self._run_id} of {self._uri}: {error}.") from error
        finally:
            # The store of a database keeps its connections; nothing in MLflow's public interface closes them.
            engine = getattr(_get_store(self._uri), "engine", None)
            if engine is not None:
                engine.dispose()


def allowed(name: str) -> str:
    """Replaces characters that MLflow's names must not have, such as @.

    >>> allowed("eval/aime-pass@4")
    'eval/aime-pass_at_4'
    """
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
