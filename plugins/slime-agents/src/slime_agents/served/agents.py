"""What an agent is given, and the two forms of an agent: an async function, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from slime_agents.served.agent_thread import AgentThread
from slime_core.errors import PluginError
from slime_core.types.prompt import Message

ALWAYS_PASSED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "SSL_CERT_FILE")
MOST_OUTPUT: Final = 65536
GRACE_S: Final = 30.0
"""For an agent that is told to end: on a busy machine one may import for as long as that."""


class AgentFailed(Exception):
    """The agent raised, ended with an error, or called nobody. It is run again, or counted as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One prompt for an agent. The label is not in it: what is rewarded must be found."""

    prompt: str
    messages: Sequence[Message] | None
    metadata: Mapping[str, Any]
    evaluation: bool
    base_url: str
    """For OpenAI's client."""
    anthropic_url: str
    """For Anthropic's client."""
    api_key: str
    model: str = "slime"
    name_thread: Callable[[str], None]
    """Calls that bring this name in the header X-Session-ID are this task's, whatever their key, in a conversation of their
    own: for clients that serve many tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """What one thread of calls has earned."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, which are logged."""
    agent: str = ""
    """Who called, where there are several, compared each with its like."""
    number: int = 0
    """Of this agent, among `num_agents`."""
    num_agents: int = 1
    is_trained: bool = True
    is_cut: bool = False
    """A limit of the agent's own ended it."""


AgentFunction: TypeAlias = Callable[[AgentTask], Awaitable[float | None]]
"""What it returns is the reward of the whole episode; None leaves that to the run's reward."""


class Agent(ABC):
    scores_itself = False
    """The run needs no reward for it: an episode that it could not end itself has none, and fails."""
    stuck: PluginError | None = None
    """What kept it from ending when it was cancelled."""

    async def open(self) -> None:
        """Once, while the run starts: PluginError, with what to type, if what it depends on is not there."""
        return

    @abstractmethod
    async def run(self, task: AgentTask) -> float | Mapping[str, Earned] | None:
        """The reward of the whole episode, or of each thread by its name; None leaves it to the run's reward. Ends when
        cancelled. AgentFailed, or whatever a function raises."""

    async def close(self) -> None:
        """At the end of the run."""
        return


class FunctionAgent(Agent):
    """Runs in an event loop beside the run's, which goes on whatever the function does."""

    def __init__(self, function: AgentFunction, *, name: str | None = None, grace_s: float = GRACE_S) -> None:
        self._function = function
        self._name = name or function.__name__
        self._grace_s = grace_s
        self._thread: AgentThread | None = None

    async def run(self, task: AgentTask) -> float | None:
        if self._thread is None:
            self._thread = AgentThread.joined()
        # Whoever is still on the way when the run ends finds it closed.
        thread = self._thread
        in_run = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.name_thread)
        aside = thread.start(self._call(replace(task, name_thread=in_run)), name=self._name)
        try:
            await asyncio.wait([aside.outcome])
        except asyncio.CancelledError:
            turned = asyncio.Event()
            aside.cancel()
            thread.call(asyncio.get_running_loop().call_soon_threadsafe, turned.set)
            await asyncio.wait([aside.outcome], timeout=self._grace_s if self.stuck is None else 0)
            if not (turned.is_set() or aside.outcome.done()):
                self.stuck = self._blocked(thread)
            raise
        return aside.outcome.result()  # type: ignore[no-any-return]

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.leave()
            self._thread = None

    async def _call(self, task: AgentTask) -> float | None:
        try:
            return await self._function(task)
        except (SystemExit, KeyboardInterrupt) as error:
            # It would end the loop of all agents.
            raise AgentFailed(f"the agent raised {error!r}") from error

    def _blocked(self, thread: AgentThread) -> PluginError:
        name, where = thread.at_work(self._function.__code__.co_filename)
        return PluginError(
            f"agent {name or self._name} blocks the event loop of all agents at {where}: it could not be ended within "
            f"{self._grace_s:g} s. Await what takes time (asyncio.sleep, openai.AsyncOpenAI, "
            "await asyncio.to_thread(function, ...)), or make it a program, which can be killed: "
            """--generate openai_agent --generate.command '["python", "agent.py"]'."""
        )


class CommandAgent(Agent):
    """Gets the task as JSON on standard input, and addresses and key in its environment; runs in a folder of its own."""

    def __init__(self, command: Sequence[str], *, environment: Sequence[str], folder: str | None) -> None:
        self._command = tuple(command)
        self._environment = tuple(environment)
        self._folder = folder

    async def run(self, task: AgentTask) -> float | None:
        with tempfile.TemporaryDirectory(prefix="slime-agent-") as folder:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._variables(task),
                cwd=self._folder or folder,
                start_new_session=True,
            )
            try:
                told = json.dumps({"prompt": task.prompt, "messages": task.messages, "metadata": dict(task.metadata)})
                output, _ = await asyncio.gather(last_of(process.stdout), give(process.stdin, told))
                code = await process.wait()
            finally:
                # Its children too, also where it has ended.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code:
            text = output.decode(errors="replace").strip()[-800:]
            raise AgentFailed(f"{self._command[0]} ended with exit code {code}: {text or 'no output'}")
        return None

    def _variables(self, task: AgentTask) -> dict[str, str]:
        passed = {name: os.environ[name] for name in (*ALWAYS_PASSED, *self._environment) if name in os.environ}
        return {
            **passed,
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_MODEL": task.model,
            "ANTHROPIC_BASE_URL": task.anthropic_url,
            "ANTHROPIC_API_KEY": task.api_key,
        }


async def last_of(stream: asyncio.StreamReader | None) -> bytes:
    """The end of what it writes, all of which is read."""
    assert stream is not None
    kept = b""
    while data := await stream.read(MOST_OUTPUT):
        kept = (kept + data)[-MOST_OUTPUT:]
    return kept


async def give(stream: asyncio.StreamWriter | None, text: str) -> None:
    assert stream is not None
    # Not every agent reads it.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(text.encode())
        await stream.drain()
    stream.close()
