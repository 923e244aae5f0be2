"""Options of slime-verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


def with_id(table: Mapping[str, Any], option: str) -> Mapping[str, Any]:
    if not isinstance(table.get("id"), str) or not table["id"]:
        raise ValueError(f'{option} requires an id: the module of an installed taskset, such as {{ id = "gsm8k" }}')
    return table


class VerifiersConfig(DriverConfig):
    env: dict[str, Any]
    """The library's own table `[env]`: `taskset = { id = ... }`, `id` of an environment, its agents with their `max_turns`,
    `timeout`, `harness` and `runtime`, `timeout`, `retries`. `sampling` is refused: the run sets it."""
    folder: RunPath | None = None
    """Folder in which to look for modules of tasksets and environments, after installed packages."""
    max_turns: int = Field(64, gt=0)
    """Turns of an agent whose table in `env` does not set them. It is then ended, scored as it is, and counts as truncated."""
    timeout_s: float = Field(3600.0, gt=0)
    """Seconds for a whole episode, with scoring; a longer one fails. For limits after which an agent is still scored, see
    `env`."""
    fork_threshold: int = Field(1024, ge=0)
    """If a call repeats the model's last response with another text: a response of fewer tokens than this is replaced by that
    text (not trained), a longer one stays a sample of its own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking."""
    ignored_parameters: tuple[str, ...] = ()
    """Parameters of an agent's calls that are ignored, such as temperature. Any other one that would not be respected is
    refused, and the episode fails."""

    @field_validator("env")
    @classmethod
    def _with_taskset(cls, env: dict[str, Any]) -> dict[str, Any]:
        with_id(env.get("taskset") or {}, "env.taskset")
        return env


class VerifiersTasksConfig(DriverConfig):
    taskset: dict[str, Any]
    """The library's own table `[env.taskset]`: `id`, and the options of this taskset."""
    folder: RunPath | None = None
    """Folder in which to look for modules of tasksets, after installed packages."""
    limit: int | None = Field(None, gt=0)
    """Number of tasks to use, from the first one. An endless taskset requires it."""
    rollout_shuffle: bool = False
    """Shuffle the tasks in each epoch, by the seed."""

    @field_validator("taskset")
    @classmethod
    def _with_id(cls, taskset: dict[str, Any]) -> dict[str, Any]:
        with_id(taskset, "taskset")
        return taskset
