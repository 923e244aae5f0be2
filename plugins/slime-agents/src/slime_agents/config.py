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
    """Limits and walls of the interpreter, which runs code in a sandbox."""

    wall_s: float = Field(10.0, gt=0)
    """Seconds that code may take."""
    cpu_s: int = Field(5, gt=0)
    """Seconds of processor time that it may use."""
    memory_mb: int = Field(512, ge=64)
    """Address space, the interpreter's own 30 MB included."""
    file_kb: int = Field(4096, gt=0)
    """Total size of its files, in KiB. They are removed when it ends."""
    max_files: int = Field(1000, gt=0)
    """Files and folders that it may have at the same time. Checked about ten times a second."""
    output_kb: int = Field(64, gt=0)
    """Size of standard output and standard error, in KiB. Code that writes more is killed."""
    workers: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), gt=0)
    """Executions at the same time; others wait, and their time limits do not run yet. By default one for each processor."""
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
    """Modules that the server imports once, so that importing them in code takes no time."""
    site_packages: bool = False
    """Whether code may also import the packages of slime's environment, not only Python's standard library."""
    require: tuple[Wall, ...] = ("network", "processes", "files")
    """Walls without which the run ends with an error at its first step. Remove a name to run without that wall."""


class RetoolConfig(DriverConfig):
    code_begin: str = "<code>"
    """Text that begins a code block."""
    code_end: str = "</code>"
    """Text that ends a code block. The model's turn ends there, and the code is run. Code fences inside are removed."""
    output_begin: str = "\n<interpreter>\n"
    """Text inserted before the output."""
    output_end: str = "\n</interpreter>\n"
    """Text inserted after the output."""
    max_tool_calls: int = Field(16, ge=0)
    """Tool calls of a response. A response with one more ends there and is truncated."""
    max_output_chars: int = Field(2048, ge=16)
    """Longer output is shortened: its middle is removed."""
    tracebacks: bool = False
    """Whether the model sees the whole traceback of an exception, or only the last line."""
    tool: bool = True
    """False: no code is run, for a comparison with the model alone."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits and walls of the interpreter."""


class AgentRole(DriverConfig):
    """One of several agents."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name in templates, metadata and metrics."""
    prompt: str | None = None
    """Jinja template of its prompt. Variables: `prompt` (the task), `metadata`, `round` (from 0), and `answers`, a dict from
    each agent's name to its responses so far, a list of texts. None: the task unchanged."""
    count: int = Field(1, gt=0)
    """Number of responses to the same text."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Limit on the tokens of a response, in addition to the run's limit."""
    outcome_share: float = Field(0.0, ge=0, le=1)
    """Weight of the outcome's reward (mean reward of the last agent) in its reward; the rest is its own response's reward."""


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
    """The agents, in the order in which they respond."""
    rounds: int = Field(1, gt=0)
    """How many times all agents respond."""

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
    """Calls that the agent may make. One more gets the error `episode_ended`, and its samples count as truncated."""
    fork_threshold: int = Field(1024, ge=0)
    """If a call repeats the model's last response with another text: a response of fewer tokens than this is replaced by that
    text (not trained), a longer one stays a sample of its own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking."""
    ignored_parameters: tuple[str, ...] = ()
    """Parameters of calls that are ignored, such as temperature. Any other one that would not be respected is refused, with an
    error response that names it."""


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
    """The box is searched for in this many characters at the end of the response."""
