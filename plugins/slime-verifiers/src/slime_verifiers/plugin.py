"""Drivers of slime-verifiers. The library is imported when they are built."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slime_core.contracts.example import Example, SourceExample
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.source import SourceDriver, SourceFactory
from slime_verifiers.config import VerifiersConfig, VerifiersTasksConfig


class Verifiers(GeneratorDriver):
    """Episodes of an environment of the verifiers library: its agents call the policy, and its rubric returns the rewards."""

    Config = VerifiersConfig
    gives_rewards = True

    @classmethod
    def build(cls, config: VerifiersConfig) -> Generator:
        from slime_agents.config import AgentConfig
        from slime_agents.served.generator import ServedAgent
        from slime_verifiers.library import require_library

        require_library("generate.name")
        from slime_verifiers.agent import EnvironmentAgent

        served = AgentConfig(
            timeout_s=config.timeout_s,
            # Calls of all agents of an episode; each agent has its own limit.
            max_calls=1_000_000,
            fork_threshold=config.fork_threshold,
            chat_template_kwargs=config.chat_template_kwargs,
            ignored_parameters=config.ignored_parameters,
        )
        return ServedAgent(EnvironmentAgent(config), served)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        (folder / "slime_example_echo.py").write_text(ECHO, encoding="utf-8")
        return [Example(options={"env": {"taskset": {"id": "slime_example_echo"}}, "folder": str(folder)})]


class VerifiersTasks(SourceDriver):
    """The tasks of a taskset of the verifiers library, as prompts."""

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
    async def contains_answer(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        for word in "one two three four five six".split():
            yield EchoTask(EchoData(prompt=f"Say {word}.", answer=word), self.config.task)

__all__ = ["EchoTaskset"]
"""
