"""Drivers of slime-buffer-service. The server is imported when it is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_buffer_service.config import OutsideAgentsConfig
from slime_core.contracts.example import Example
from slime_core.contracts.generator import Generator, GeneratorDriver


class OutsideAgents(GeneratorDriver):
    """Answers come from agents outside the run, over HTTP: prompts out, trajectories in."""

    Config = OutsideAgentsConfig

    @classmethod
    def build(cls, config: OutsideAgentsConfig) -> Generator:
        from slime_buffer_service.generator import OutsideAgents as Built

        return Built(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"port": 0, "token_file": str(folder / "token"), "policy_after_s": 0.001})]
