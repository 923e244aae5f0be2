"""The interpreter against code that means harm."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slime_agents.sandbox import Execution, Interpreter, Outcome, SandboxConfig
from slime_core.errors import PluginError


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter(SandboxConfig(wall_s=60, cpu_s=30, memory_mb=256, file_kb=512, output_kb=8, workers=2))


def run(interpreter: Interpreter, code: str) -> Execution:
    return asyncio.run(interpreter.run(code))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_code_is_run_and_its_errors_are_reported(interpreter: Interpreter) -> None:
    done = run(interpreter, "import math\nprint(math.factorial(20) // 7)")
    assert (done.outcome, done.out, done.err) == (Outcome.OK, f"{2432902008176640000 // 7}\n", "")
    wrong = run(interpreter, "print('before')\n\ndef f(x):\n    return 1 // x\nf(0)")
    assert (wrong.outcome, wrong.out) == (Outcome.WRONG, "before\n")
    assert wrong.reason == "ZeroDivisionError: integer division or modulo by zero"
    # Its own lines, and none of those that ran it.
    assert "line 5" in wrong.err
    assert "line 4" in wrong.err
    assert "job.py" not in wrong.err
    assert run(interpreter, "print(").reason.startswith("SyntaxError")
    assert run(interpreter, "raise SystemExit(3)").reason == "exit code 3"
    assert run(interpreter, "raise SystemExit").outcome is Outcome.OK
    assert run(interpreter, "import os; os.write(1, b'\\xff')").out == "\ufffd"


def test_jobs_share_nothing(interpreter: Interpreter) -> None:
    assert run(interpreter, "import math; math.pi = 3; open('here', 'w').write('x')").outcome is Outcome.OK
    again = run(interpreter, "import math, os; print(math.pi, os.listdir())")
    assert again.out == "3.141592653589793 []\n"

    async def together() -> list[Execution]:
        return await asyncio.gather(*(interpreter.run(f"print({number} ** 2)") for number in range(20)))

    assert [done.out for done in asyncio.run(together())] == [f"{number**2}\n" for number in range(20)]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: print('x' * 1000)", "more than 8 KiB of output"),
        ("import os\nwhile True: os.fork()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.posix_spawn('/x', ['x'], {})", "PermissionError: [Errno 1] Operation not permitted: '/x'"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.kill(-1, 9)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "PermissionError: [Errno 1] Operation not permitted"),
        ("b = bytearray(10**9)", "MemoryError"),
        ("open('big', 'w').write('x' * 10**6)", "OSError: [Errno 27] File too large"),
        (
            "import time\nfor n in range(10**6): open(f'f{n}', 'w').write('x' * 10**5); time.sleep(0.01)",
            "more than 512 KiB of files",
        ),
        (
            "import time\nfor n in range(10**6): open(f'f{n}', 'w').close(); time.sleep(1e-5)",
            "more than 1000 files and folders",
        ),
        (
            "import os, time\nwhile True: os.mkdir('d'); os.chdir('d'); time.sleep(1e-5)",
            "more than 1000 files and folders",
        ),
        (
            "import os, time\nfor n in range(99): os.mkdir('d' * 99); os.chdir('d' * 99)\ntime.sleep(99)",
            "files in a folder that cannot be looked into: locked, or too deep",
        ),
        ("print(open('/proc/self/environ').read())", "PermissionError: [Errno 13] Permission denied: '/proc/self/environ'"),
        ("print(open('/etc/passwd').read())", "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError: not allowed to raise maximum limit"),
    ],
)  # fmt: skip
def test_harm_ends_with_the_code(interpreter: Interpreter, code: str, reason: str) -> None:
    done = run(interpreter, code)
    assert (done.outcome, done.reason) == (Outcome.WRONG, reason)
    assert len(done.out) <= 8192


def test_a_flood_of_folders_does_not_delay_other_code() -> None:
    interpreter = Interpreter(SandboxConfig(wall_s=120, cpu_s=100, workers=2))

    async def scene() -> tuple[Execution, list[Execution]]:
        flood = asyncio.create_task(interpreter.run("import os\nn = 0\nwhile True:\n  os.mkdir(f'd{n}'); n += 1"))
        beside = []
        while not flood.done():
            beside.append(await interpreter.run("print(6 * 7)"))
        return await flood, beside

    flood, beside = asyncio.run(scene())
    assert (flood.outcome, flood.reason) == (Outcome.WRONG, "more than 1000 files and folders")
    assert flood.seconds < 20
    assert {done.out for done in beside} == {"42\n"}
    assert max(done.seconds for done in beside) < 10
    interpreter.close()


def test_deep_and_locked_folders_of_a_job_are_removed() -> None:
    interpreter = Interpreter(SandboxConfig(wall_s=60, cpu_s=30, max_files=10**5, workers=1))
    code = (
        "import os\nfor name in ('a', 'b'):\n  os.mkdir(name, 0o500); open(name + '.txt', 'w').close()\n"
        "for n in range(1500): os.mkdir('d'); os.chdir('d')\nos.mkdir('locked', 0)"
    )
    done = run(interpreter, code)
    # Who is not root cannot look into the locked folder: one look between its making and the job's end, and the job is
    # ended for it. What it leaves is the same.
    hidden = "files in a folder that cannot be looked into: locked, or too deep"
    assert (done.outcome, done.reason) in {(Outcome.OK, ""), (Outcome.WRONG, hidden)}
    # There is one worker, and what it left is its business.
    assert run(interpreter, "print(7)").out == "7\n"
    server = interpreter._server
    assert server is not None
    assert not server.has_ended
    assert not [path for path in Path(server._folder).iterdir() if path.name.startswith("1")]
    interpreter.close()
    assert not Path(server._folder).exists()


def test_nothing_outside_is_touched(interpreter: Interpreter, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    for attempt in (
        f"open({str(victim)!r}, 'w')",
        f"import os; os.unlink({str(victim)!r})",
        f"import os; os.rename({str(victim)!r}, 'mine')",
        f"import os; os.chmod({str(victim)!r}, 0)",
        f"import os; os.truncate({str(victim)!r}, 0)",
        f"import os; os.utime({str(victim)!r}, (0, 0))",
        f"import os; os.symlink({str(victim)!r}, 'link'); open('link', 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    ):
        assert "Errno" in run(interpreter, attempt).reason, attempt
    assert victim.read_text() == "as it was"
    assert victim.stat().st_mtime > 1e9
    assert os.listdir(tmp_path) == ["victim"]


def test_code_that_takes_too_long() -> None:
    interpreter = Interpreter(SandboxConfig(wall_s=60, cpu_s=1, workers=1))
    busy = run(interpreter, "print('begun', flush=True)\nwhile True: pass")
    assert (busy.outcome, busy.reason, busy.out) == (Outcome.TIMEOUT, "more than 1 s of processor time", "begun\n")
    stubborn = run(interpreter, "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert stubborn.outcome is Outcome.TIMEOUT
    idle = run(Interpreter(SandboxConfig(wall_s=0.3)), "import time; time.sleep(100)")
    assert (idle.outcome, idle.reason) == (Outcome.TIMEOUT, "no end within 0.3 s")
    assert idle.seconds < 30


def test_the_environment_is_the_jobs_own(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the run")
    done = run(
        Interpreter(SandboxConfig(workers=1)), "import os; print(sorted(os.environ), os.getcwd() == os.environ['HOME'])"
    )
    assert done.out == "['HOME', 'LANG', 'PATH', 'TMPDIR'] True\n"


def test_a_lost_server_is_reported_and_replaced(interpreter: Interpreter) -> None:
    async def scene() -> tuple[Execution, Execution]:
        waiting = asyncio.create_task(interpreter.run("import time; time.sleep(50)"))
        while True:
            await asyncio.sleep(0.05)
            server = interpreter._server
            if server is not None and server._asked:
                break
        os.killpg(server._process.pid, signal.SIGKILL)
        return await waiting, await interpreter.run("print(7)")

    lost, after = asyncio.run(scene())
    assert (lost.outcome, lost.reason) == (Outcome.INFRA, "the sandbox's fork server died")
    assert (after.outcome, after.out) == (Outcome.OK, "7\n")


def test_a_lost_or_silent_server_does_not_block_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    # With `wall_s`, all of which the code that is run afterwards has, half a second.
    monkeypatch.setattr("slime_agents.sandbox.interpreter.SILENCE_S", -59.5)
    interpreter = Interpreter(SandboxConfig(wall_s=60, workers=1))

    async def scene() -> tuple[Execution, Execution, dict[str, Any]]:
        await interpreter.start()
        server = interpreter._server
        assert server is not None
        os.killpg(server._process.pid, signal.SIGSTOP)
        silent = await asyncio.wait_for(interpreter.run("print(1)"), 20)
        monkeypatch.undo()
        after = await interpreter.run("print(7)")
        # Lost between the look at it and the question.
        return silent, after, await asyncio.wait_for(server.ask("print(2)"), 20)

    silent, after, gone = asyncio.run(scene())
    assert (silent.outcome, silent.reason) == (Outcome.INFRA, "the sandbox's fork server has been silent for 0.5 s")
    assert (after.outcome, after.out) == (Outcome.OK, "7\n")
    assert gone == {"cause": "infra", "detail": "the sandbox's fork server died"}
    interpreter.close()


def test_a_cancelled_call_ends_its_job(interpreter: Interpreter) -> None:
    async def scene() -> float:
        begun = time.monotonic()
        held = [asyncio.create_task(interpreter.run("import time; time.sleep(50)")) for _ in range(2)]
        await asyncio.sleep(0.2)
        for task in held:
            task.cancel()
        # Both workers were busy, so this waits for one of them.
        assert (await interpreter.run("print(1)")).outcome is Outcome.OK
        return time.monotonic() - begun

    assert asyncio.run(scene()) < 40


def test_nothing_is_left(tmp_path: Path) -> None:
    script = (
        "import asyncio\nfrom slime_agents.sandbox import Interpreter, SandboxConfig\n"
        "i = Interpreter(SandboxConfig())\nprint(asyncio.run(i.run('print(5)')).out.strip(), i._server._process.pid)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    five, pid = ended.stdout.split()
    assert five == "5"
    assert not is_there(int(pid))
    assert os.listdir(tmp_path) == []


def test_available_walls_are_reported_and_required_ones_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    plain = Interpreter(SandboxConfig())
    assert asyncio.run(plain.start()) == {"network", "processes", "files"}
    assert "PermissionError" in run(plain, "import os; os.kill(os.getppid(), 0)").reason
    with pytest.raises(PluginError, match=r'bwrap is not installed.*sandbox.require = \["files"\]'):
        asyncio.run(Interpreter(SandboxConfig(require=("files", "bubblewrap"))).start())
