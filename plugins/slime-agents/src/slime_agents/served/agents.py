"""AgentTask, the input of an agent, and the two kinds of agents: an async function, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
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
LAST_OUTPUT_S: Final = 1.0
"""Seconds after the end of a program in which its output must end too."""
GRACE_S: Final = 30.0
"""Seconds that a cancelled agent has to end: on a busy machine imports alone may take as long."""


class AgentFailed(Exception):
    """The agent raised, ended with an error, or did not call the model. It is run again, or counted as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One prompt for an agent, without the label."""

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
    """Registers a thread name. Calls with this name in the header X-Session-ID belong to this task, whatever their key, in a
    separate conversation: for clients that serve many tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """Reward of one thread of calls."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, which are logged."""
    agent: str = ""
    """Name of the calling agent, if there are several. Each agent is compared only with itself."""
    number: int = 0
    """Index of this agent, below `num_agents`."""
    num_agents: int = 1
    is_trained: bool = True
    is_cut: bool = False
    """Whether the agent's own limit ended it."""


AgentFunction: TypeAlias = Callable[[AgentTask], Awaitable[float | None]]
"""Returns the reward of the whole episode, or None to use the run's reward."""


class Agent(ABC):
    scores_itself = False
    """Whether the agent scores its episodes. If so, the run needs no reward, and an episode that a limit ended fails."""
    stuck: PluginError | None = None
    """Why it did not end when it was cancelled."""

    async def open(self) -> None:
        """Called once, while the run starts. PluginError, with the command to type, if a dependency is missing."""
        return

    @abstractmethod
    async def run(self, task: AgentTask) -> float | Mapping[str, Earned] | None:
        """Returns the reward of the whole episode, or of each thread by its name; None: the run's reward scores it. Must end
        when cancelled. Raises AgentFailed, or any exception of a function."""

    async def close(self) -> None:
        """Called at the end of the run."""
        return


class FunctionAgent(Agent):
    """Runs in an event loop beside the run's, which continues whatever the function does."""

    def __init__(self, function: AgentFunction, *, name: str | None = None, grace_s: float = GRACE_S) -> None:
        self._function = function
        self._name = name or function.__name__
        self._grace_s = grace_s
        self._thread: AgentThread | None = None

    async def run(self, task: AgentTask) -> float | None:
        if self._thread is None:
            self._thread = AgentThread.joined()
        # A local reference: `close` sets the attribute to None while calls may still run.
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
            # Unchanged, it would end the event loop of all agents.
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

    async def open(self) -> None:
        if self._folder is not None and not os.path.isdir(self._folder):
            raise PluginError(f'generate.folder = "{self._folder}": there is no such folder.')
        program = self._command[0]
        is_relative = "/" in program and not os.path.isabs(program)
        # Without a folder it starts in an empty one.
        found = None if is_relative and self._folder is None else os.path.join(self._folder or "", program)
        if found is None or shutil.which(found if "/" in program else program) is None:
            how = " Write its whole path, or set generate.folder." if is_relative and self._folder is None else ""
            raise PluginError(f'generate.command = "{program}": there is no such program, or it may not be run.{how}')

    async def run(self, task: AgentTask) -> float | None:
        message = json.dumps({"prompt": task.prompt, "messages": task.messages, "metadata": dict(task.metadata)})
        with tempfile.TemporaryDirectory(prefix="slime-agent-") as folder:
            read_end, write_end = os.pipe()
            stream, closing = await reader_of(read_end)
            reading = asyncio.create_task(last_of(stream))
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=write_end,
                    stderr=asyncio.subprocess.STDOUT,
                    env=self._variables(task),
                    cwd=self._folder or folder,
                    start_new_session=True,
                )
            except BaseException:
                closing.close()
                raise
            finally:
                os.close(write_end)
            giving = asyncio.create_task(give(process.stdin, message))
            try:
                code = await process.wait()
                # A process that the agent has left behind may keep its output open for ever.
                await asyncio.wait([reading], timeout=LAST_OUTPUT_S)
            finally:
                closing.close()
                if not giving.done():
                    giving.cancel()
                    assert process.stdin is not None
                    process.stdin.transport.abort()
                # Kills its child processes too, also if it has ended itself.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code:
            text = (await reading).decode(errors="replace").strip()[-800:]
            raise AgentFailed(f"{self._command[0]} ended with exit code {code}: {text or 'no output'}")
        return None

    def _variables(self, task: AgentTask) -> dict[str, str]:
        passed = {name: os.environ[name] for name in (*ALWAYS_PASSED, *self._environment) if name in os.environ}
        return {
            **passed,
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_MODEL": task.model,
            "OPENAI_DEFAULT_MODEL": task.model,
            # openai-agents would send its traces, with all messages, to OpenAI.
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_BASE_URL": task.anthropic_url,
            "ANTHROPIC_API_KEY": task.api_key,
        }


async def reader_of(read_end: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """Reads a pipe. Closing the transport ends the stream, even if a process may still write."""
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
    )
    return stream, transport


async def last_of(stream: asyncio.StreamReader) -> bytes:
    """Reads the stream to its end, and returns the last MOST_OUTPUT bytes."""
    kept = b""
    while data := await stream.read(MOST_OUTPUT):
        kept = (kept + data)[-MOST_OUTPUT:]
    return kept


async def give(stream: asyncio.StreamWriter | None, text: str) -> None:
    assert stream is not None
    # An agent may end without reading its input.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(text.encode())
        await stream.drain()
    stream.close()
