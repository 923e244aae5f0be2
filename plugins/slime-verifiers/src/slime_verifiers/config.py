"""Options of slime-verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


def with_id(table: Mapping[str, Any], option: str) -> Mapping[str, Any]:
    if not isinstance(table.get("id"), str) or not table["id"]:
        raise ValueError(f'{option} needs an id: the module of an installed taskset, such as {{ id = "gsm8k" }}')
    return table


class VerifiersConfig(DriverConfig):
    env: dict[str, Any]
    """The library's own table `[env]`: `taskset = { id = ... }`, `id` of an environment, its agents with their `max_turns`,
    `timeout`, `sampling` (of which nothing is looked at), `harness` and `runtime`, `timeout`, `retries`."""
    folder: RunPath | None = None
    """Where modules of tasksets and environments are looked for besides what is installed."""
    max_turns: int = Field(64, gt=0)
    """Of an agent whose table in `env` does not say: then it is ended, scored as it is, and counts as truncated."""
    timeout_s: float = Field(3600.0, gt=0)
    """Seconds for a whole episode, scoring included; it fails then. Limits of agents that are scored all the same are in
    `env`."""
    fork_threshold: int = Field(1024, ge=0)
    """Where an agent goes on with another text than the model's last response, one of fewer tokens is given up (not trained);
    a longer one stays a sample of its own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the chat template, such as enable_thinking."""

    @field_validator("env")
    @classmethod
    def _with_taskset(cls, env: dict[str, Any]) -> dict[str, Any]:
        with_id(env.get("taskset") or {}, "env.taskset")
        return env


class VerifiersTasksConfig(DriverConfig):
    taskset: dict[str, Any]
    """The library's own table `[env.taskset]`: `id`, and what this taskset takes."""
    folder: RunPath | None = None
    """Where modules of tasksets are looked for besides what is installed."""
    limit: int | None = Field(None, gt=0)
    """The first so many tasks. One that never ends needs a limit."""
    rollout_shuffle: bool = False
    """Another order each epoch, by the seed."""

    @field_validator("taskset")
    @classmethod
    def _with_id(cls, taskset: dict[str, Any]) -> dict[str, Any]:
        with_id(taskset, "taskset")
        return taskset
