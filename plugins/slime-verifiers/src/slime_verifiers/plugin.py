"""Drivers of slime-verifiers. The library is imported when they are built."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field, field_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example, SourceExample
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.paths import RunPath
from slime_core.contracts.source import SourceDriver, SourceFactory


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


class Verifiers(GeneratorDriver):
    """Episodes of an environment of the verifiers library: its agents call the policy, its rubric gives the rewards."""

    Config = VerifiersConfig
    gives_rewards = True

    @classmethod
    def build(cls, config: VerifiersConfig) -> Generator:
        from slime_agents.plugin import AgentConfig
        from slime_agents.served.generator import ServedAgent
        from slime_verifiers.library import require_library

        require_library("generate.name")
        from slime_verifiers.agent import EnvironmentAgent

        served = AgentConfig(
            timeout_s=config.timeout_s,
            # Of all agents of an episode, each of which has a limit of its own.
            max_calls=1_000_000,
            fork_threshold=config.fork_threshold,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        return ServedAgent(EnvironmentAgent(config), served)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        (folder / "slime_example_echo.py").write_text(ECHO, encoding="utf-8")
        return [Example(options={"env": {"taskset": {"id": "slime_example_echo"}}, "folder": str(folder)})]


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


class VerifiersTasks(SourceDriver):
    """Prompts that are the tasks of a taskset of the verifiers library."""

    Config = VerifiersTasksConfig

    @classmethod
    def build(cls, config: VerifiersTasksConfig) -> SourceFactory:
        from slime_verifiers.library import require_library

        require_library("data.source")
        from slime_verifiers.source import TaskSource

        return functools.partial(TaskSource, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        (folder / "slime_example_words.py").write_text(ECHO, encoding="utf-8")
        options = {"taskset": {"id": "slime_example_words"}, "folder": str(folder)}
        return [
            SourceExample(options=options, other_options={**options, "limit": 4}),
            SourceExample(options={**options, "rollout_shuffle": True}, seeded=True, label_key="label"),
        ]


ECHO: Final = """
import verifiers.v1 as vf

class EchoData(vf.TaskData):
    answer: str = ""

class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def said(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        for word in "one two three four five six".split():
            yield EchoTask(EchoData(prompt=f"Say {word}.", answer=word), self.config.task)

__all__ = ["EchoTaskset"]
"""
