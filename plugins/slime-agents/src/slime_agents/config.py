"""Options of slime-agents."""

from __future__ import annotations

import os
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath

Wall = Literal["network", "processes", "files", "bubblewrap"]
WALLS: Final[dict[str, str]] = {
    "network": "no sockets (seccomp, on Linux with x86_64 or aarch64)",
    "processes": "no processes and no signals to others (seccomp)",
    "files": "reads Python's own library alone, writes its own folder alone (Landlock, Linux 5.13 or later)",
    "bubblewrap": "namespaces of its own and a read-only file system besides (bwrap, where it is installed and may)",
}


class SandboxConfig(DriverConfig):
    """Limits and walls of the interpreter."""

    wall_s: float = Field(10.0, gt=0)
    """Seconds that code may take."""
    cpu_s: int = Field(5, gt=0)
    """Seconds of processor time that it may use."""
    memory_mb: int = Field(512, ge=64)
    """Address space, the interpreter's own 30 MB included."""
    file_kb: int = Field(4096, gt=0)
    """What its files may take together; they are gone when it ends."""
    max_files: int = Field(1000, gt=0)
    """Files and folders that it may have at the same time. It is looked at some ten times a second."""
    output_kb: int = Field(64, gt=0)
    """Output beyond that ends it."""
    workers: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), gt=0)
    """Executions at the same time; others wait, and their time does not run. By default one for each processor."""
    preload: tuple[str, ...] = (
        "collections",
        "fractions",
        "functools",
        "itertools",
        "math",
        "random",
        "re",
        "statistics",
    )
    """Modules that are imported once, so that code which imports them need not wait."""
    site_packages: bool = False
    """Whether code may import what is installed beside slime, not only Python's own library."""
    require: tuple[Wall, ...] = ("network", "processes", "files")
    """Walls without which nothing is run: an error at the first step. What a machine lacks can be given up here by name."""


class RetoolConfig(DriverConfig):
    code_begin: str = "<code>"
    """What a code block begins with."""
    code_end: str = "</code>"
    """What it ends with: there the model's turn ends, and the code is run. Code fences inside are left out."""
    output_begin: str = "\n<interpreter>\n"
    """What stands before the output."""
    output_end: str = "\n</interpreter>\n"
    """What stands after it."""
    max_tool_calls: int = Field(16, ge=0)
    """An answer that asks once more ends there, truncated."""
    max_output_chars: int = Field(2048, ge=16)
    """Of longer output the middle is left out."""
    tracebacks: bool = False
    """Whether the model sees the whole traceback of its code, or only the last line."""
    tool: bool = True
    """Off: nothing is run, for a comparison with the model alone."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits and walls of the interpreter."""


class AgentRole(DriverConfig):
    """One of several agents."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """How templates, metadata and metrics call it."""
    prompt: str | None = None
    """What it reads: a Jinja template of `prompt` (the task), `metadata`, `round` (from 0), and `answers`, which has a list of
    texts for each agent's name. None: the task as it is."""
    count: int = Field(1, gt=0)
    """Answers to the same text."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Tokens that an answer may have, besides the run's own limit."""
    outcome_share: float = Field(0.0, ge=0, le=1)
    """Its reward is this much of the outcome's (the mean of the agent that speaks last), and the rest its own answer's."""


SOLVER: Final = AgentRole(name="solver")
CRITIC: Final = AgentRole(
    name="critic",
    prompt="{{ prompt }}\n{{ answers.solver[-1] }}\nWhat is wrong with this answer?\n",
    outcome_share=1.0,
)
EDITOR: Final = AgentRole(
    name="editor",
    prompt="{{ prompt }}\n{{ answers.solver[-1] }}\n{{ answers.critic[-1] }}\nThe right answer:\n",
)


class MultiAgentConfig(DriverConfig):
    agents: tuple[AgentRole, ...] = Field((SOLVER, CRITIC, EDITOR), min_length=1)
    """In the order in which they speak."""
    rounds: int = Field(1, gt=0)
    """How often all of them speak."""

    @model_validator(mode="after")
    def _names_differ(self) -> MultiAgentConfig:
        names = [agent.name for agent in self.agents]
        if len(set(names)) < len(names):
            raise ValueError(f"agents: {', '.join(names)}: each needs a name of its own")
        return self


class AgentConfig(DriverConfig):
    """Options of every agent that is called over HTTP."""

    timeout_s: float = Field(600.0, gt=0)
    """Seconds after which the agent is ended; its samples count as truncated."""
    max_calls: int = Field(64, gt=0)
    """Calls that it may make; then it is told that there are no more answers, and its samples count as truncated."""
    fork_threshold: int = Field(1024, ge=0)
    """Where an agent goes on with another text than the model's last response, one of fewer tokens is given up (not trained);
    a longer one stays a sample of its own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the chat template, such as enable_thinking."""


class CommandConfig(AgentConfig):
    command: tuple[str, ...] = Field(min_length=1)
    """A program and its arguments. It gets the task as JSON on standard input, and OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment."""
    environment: tuple[str, ...] = ()
    """Variables of the run's environment that it gets too, besides PATH, HOME and the language."""
    folder: RunPath | None = None
    """Where it runs; by default in an empty folder of its own, which is removed."""


class RetoolRewardConfig(DriverConfig):
    shown_characters: int = Field(100, gt=0)
    """How far from the end the box may stand."""
