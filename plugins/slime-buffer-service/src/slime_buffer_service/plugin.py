"""Drivers of slime-buffer-service. The server is imported when it is built."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from slime_buffer_service.config import ExternalAgentsConfig
from slime_core.contracts.example import Example
from slime_core.contracts.generator import Generator, GeneratorDriver


class ExternalAgents(GeneratorDriver):
    """Responses come from agents outside the run, over HTTP: prompts out, trajectories in."""

    Config = ExternalAgentsConfig
    per_worker = False

    @classmethod
    def build(cls, config: ExternalAgentsConfig) -> Generator:
        from slime_buffer_service.generator import ExternalAgents as Built

        return Built(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"port": 0, "token_file": str(folder / "token"), "policy_after_s": 0.001})]


class OutsideAgents(ExternalAgents):
    """The name that `external_agents` had in 0.1; it works until 0.3."""

    @classmethod
    def build(cls, config: ExternalAgentsConfig) -> Generator:
        print(
            "warning: the generator outside_agents is now external_agents; the old name works until 0.3.",
            file=sys.stderr,
        )
        return super().build(config)
