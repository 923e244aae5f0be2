"""Interpreter: runs Python code, each piece in a new process that `inside` isolates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Final

from slime_agents.config import WALLS, SandboxConfig
from slime_agents.sandbox.execution import Execution, Outcome
from slime_agents.sandbox.inside.scratch import remove
from slime_core.errors import PluginError

INSIDE: Final = Path(__file__).parent / "inside"
PUBLIC: Final = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/zero",
)
"""Paths that code may read, in addition to Python's library."""
START_S: Final = 30.0
SILENCE_S: Final = 60.0
"""Seconds without a result, in addition to `wall_s`, after which the server counts as lost. They include the wait of a
request while other code runs and files are removed."""
REMOVALS: Final = 5


def infra(detail: str) -> dict[str, Any]:
    """The server's result for code that could not be run."""
    return {"cause": "infra", "detail": detail}


DIED: Final = infra("the sandbox's fork server died")


class Interpreter:
    """Starts a fork server when it is first needed and after one has died, and ends it when this object is freed."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._server: ForkServer | None = None
        self._starting = threading.Lock()

    async def start(self) -> frozenset[str]:
        """Starts the server, and returns the walls in effect. PluginError if a required wall is missing."""
        return (await asyncio.to_thread(self._running)).walls

    async def run(self, code: str) -> Execution:
        server = self._server
        if server is None or server.has_ended:
            server = await asyncio.to_thread(self._running)
        return execution_of(await server.ask(code), self._config, server.walls)

    def close(self) -> None:
        if self._server is not None:
            self._server.end()

    def _running(self) -> ForkServer:
        with self._starting:
            if self._server is None or self._server.has_ended:
                self._server = started(self._config)
            return self._server


def started(config: SandboxConfig) -> ForkServer:
    """Starts the server in bubblewrap if that is installed and permitted to make namespaces, else without it."""
    problem = "bwrap is not installed"
    if bwrap := shutil.which("bwrap"):
        try:
            return required(ForkServer(config, bwrap), config)
        except OSError as error:
            problem = f"bwrap failed: {error}"
    try:
        return required(ForkServer(config, None), config, problem)
    except OSError as error:
        raise PluginError(f"the sandbox's fork server did not start: {error}") from error


def required(server: ForkServer, config: SandboxConfig, problem: str = "") -> ForkServer:
    if missing := [wall for wall in config.require if wall not in server.walls]:
        server.end()
        lacking = "; ".join(
            f"{wall}: {WALLS[wall]}{', ' + problem if wall == 'bubblewrap' else ''}" for wall in missing
        )
        rest = [wall for wall in config.require if wall not in missing]
        raise PluginError(
            f"the sandbox lacks a wall on this machine ({lacking}). Use a machine that has it, or run without it: set "
            f"sandbox.require = {json.dumps(rest)}."
        )
    return server


class ForkServer:
    """Client of the fork server in `inside`. OSError if it does not start."""

    def __init__(self, config: SandboxConfig, bwrap: str | None) -> None:
        self._folder = tempfile.mkdtemp(prefix="slime-sandbox-")
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[dict[str, Any]]]] = {}
        self._lock = threading.Lock()
        self._silence_s = config.wall_s + SILENCE_S
        self._heard = 0.0
        """Time of its last result."""
        self.has_ended = False
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, once the server has started
        self._process = subprocess.Popen(
            [*walled(bwrap, self._folder), sys.executable, "-I", "-S", str(INSIDE), settings(config, self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={"LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
        self.end = weakref.finalize(self, end_process, self._process, self._folder)
        assert self._process.stdout is not None
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        hello = self._process.stdout.readline()
        timer.cancel()
        if not hello:
            log.seek(0)
            output = log.read().decode(errors="replace").strip()[-500:]
            self.end()
            raise OSError(output or f"it ended with {self._process.returncode}")
        log.close()
        self.walls = frozenset(json.loads(hello)["walls"]) | ({"bubblewrap"} if bwrap else frozenset())
        threading.Thread(target=listen, args=(weakref.ref(self), self._process.stdout), daemon=True).start()

    async def ask(self, code: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        result: asyncio.Future[dict[str, Any]] = loop.create_future()
        with self._lock:
            if self.has_ended:
                return DIED
            self._asked[number] = (loop, result)
        begun = time.monotonic()
        await self._send({"id": number, "code": code})
        try:
            while (left := max(begun, self._heard) + self._silence_s - time.monotonic()) > 0:
                await asyncio.wait([result], timeout=left)
                if result.done():
                    return result.result()
        except asyncio.CancelledError:
            await self._send({"cancel": number})
            raise
        # No further request is sent; ending it ends the other requests too.
        self.has_ended = True
        loop.run_in_executor(None, self.end)
        return infra(f"the sandbox's fork server has been silent for {self._silence_s:g} s")

    async def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        # A pipe holds 64 KiB; a longer text may have to wait until it is read.
        if len(data) < 4096:
            self._write(data)
        else:
            await asyncio.to_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def on_result(self, result: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        with self._lock:
            asked = self._asked.pop(result["id"], None)
        if asked is not None:
            set_result(*asked, result)

    def on_lost(self) -> None:
        """Ends all pending requests, since the server has closed its output."""
        with self._lock:
            self.has_ended = True
            asked, self._asked = self._asked, {}
        for loop, future in asked.values():
            set_result(loop, future, DIED)
        self.end()


def listen(server: weakref.ref[ForkServer], output: Any) -> None:
    """Reads results, in a separate thread. It holds a strong reference to the server only while it handles a result."""
    for line in output:
        if (known := server()) is None:
            return
        known.on_result(json.loads(line))
        del known
    if (known := server()) is not None:
        known.on_lost()


def set_result(loop: asyncio.AbstractEventLoop, future: asyncio.Future[dict[str, Any]], result: dict[str, Any]) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(result)

    # A closed loop has no waiting task.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)


def end_process(process: subprocess.Popen[bytes], folder: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Its child processes end a moment later, and may write until then.
    for _ in range(REMOVALS):
        with contextlib.suppress(OSError):
            remove(folder)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)


def walled(bwrap: str | None, folder: str) -> list[str]:
    if bwrap is None:
        return []
    # Not --die-with-parent, which acts when the starting thread ends. The server ends when its standard input closes.
    return [
        bwrap, "--unshare-all", "--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev", "/dev",
        "--proc", "/proc", "--bind", folder, folder, "--chdir", "/",
    ]  # fmt: skip


def settings(config: SandboxConfig, folder: str) -> str:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("LIBDIR")]
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] if config.site_packages else []
    return json.dumps(
        {
            "scratch": folder,
            "wall_s": config.wall_s,
            "cpu_s": config.cpu_s,
            "memory_bytes": config.memory_mb * 2**20,
            "file_bytes": config.file_kb * 2**10,
            "max_files": config.max_files,
            "output_bytes": config.output_kb * 2**10,
            "workers": config.workers,
            "preload": config.preload,
            "packages": list(dict.fromkeys(packages)),
            "readable": [path for path in dict.fromkeys([*library, *packages, *PUBLIC]) if path],
        }
    )


def execution_of(result: dict[str, Any], config: SandboxConfig, walls: frozenset[str]) -> Execution:
    outcome, reason = outcome_of(result, config)
    return Execution(
        outcome=outcome,
        reason=reason,
        out=result.get("out", ""),
        err=result.get("err", ""),
        seconds=result.get("seconds", 0.0),
        walls=walls,
    )


def outcome_of(result: dict[str, Any], config: SandboxConfig) -> tuple[Outcome, str]:
    cause = result["cause"]
    if cause == "infra":
        return Outcome.INFRA, result["detail"]
    if cause == "wall":
        return Outcome.TIMEOUT, f"no end within {config.wall_s:g} s"
    if cause == "output":
        return Outcome.WRONG, f"more than {config.output_kb} KiB of output"
    if cause == "files":
        return Outcome.WRONG, f"more than {config.file_kb} KiB of files"
    if cause == "entries":
        return Outcome.WRONG, f"more than {config.max_files} files and folders"
    if cause == "hidden":
        return Outcome.WRONG, "files in a folder that cannot be looked into: locked, or too deep"
    status = result["status"]
    if status == 0:
        return Outcome.OK, ""
    if status > 0:
        lines = result["err"].strip().splitlines()
        return Outcome.WRONG, lines[-1] if lines else f"exit code {status}"
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and result["cpu_s"] >= config.cpu_s):
        return Outcome.TIMEOUT, f"more than {config.cpu_s} s of processor time"
    return Outcome.WRONG, f"killed by {signal.Signals(-status).name}"
