"""The end of a server is the end of all that it has started. Real processes: a main one, and children that outlive it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slime_core.errors import EngineError
from slime_serving import process_group as process_end
from slime_serving.process_group import has_ended
from slime_serving.server_process import ServerProcess
from slime_sglang.log_format import SGLANG_LOG

MAIN = """
import subprocess, sys, time
sys.stdin.readline()
# Its memory is freed a while after the main process has ended, as that of a scheduler.
SCHEDULER = "import signal, time; signal.signal(15, signal.SIG_IGN); m = bytearray(b'x') * 2**28; print('up', flush=True)"
COMPILER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)'])"
SLEEP = "; time.sleep(90)"
children = [subprocess.Popen([sys.executable, "-c", SCHEDULER + SLEEP], stdout=subprocess.PIPE)]
if "--ends" not in sys.argv:
    asked = [sys.executable, "-c", COMPILER + "; print('up', flush=True)" + SLEEP]
    children.append(subprocess.Popen(asked, stdout=subprocess.PIPE, start_new_session=True))
for child in children:
    child.stdout.readline()
print("all up", flush=True)
time.sleep(0 if "--ends" in sys.argv else 90)
"""


@pytest.fixture
def started(tmp_path):
    """The server, when all its children are there."""
    (tmp_path / "stubborn.py").write_text(MAIN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def start(*arguments):
        server = ServerProcess(
            "stubborn", {}, log=tmp_path / "log", form=SGLANG_LOG, environment=environment, arguments=arguments
        )
        while "all up" not in server.log.read_text():
            assert server.exit_code in (None, 0), server.last_lines()
        return server

    return start


def runs(pid):
    """Whether the process runs, by the kernel's state: a zombie holds no resources."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_nothing_is_left_when_it_has_stopped(started):
    server = started()
    children = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
    assert len(children) == 3
    assert all(runs(pid) for pid in children)
    await server.stop()
    assert [pid for pid in (server.pid, *children) if runs(pid)] == []
    assert server.ending == "was killed by SIGKILL"
    await server.stop()


async def test_children_of_a_server_that_has_died_end_too(started):
    """They are found by its group."""
    server = started("--ends")
    in_group = [pid for pid in psutil.pids() if process_end.group_of(pid) == server.pid]
    server._process.wait(60)
    children = [pid for pid in in_group if pid != server.pid]
    assert [runs(pid) for pid in children] == [True]
    await server.stop()
    assert [runs(pid) for pid in children] == [False]


async def test_processes_that_do_not_end_are_named(started, monkeypatch):
    """Simulates a process that the kernel cannot end, such as one in a driver that hangs."""
    server = started()
    monkeypatch.setattr("slime_serving.server_process.END_S", 0.1)
    monkeypatch.setattr(process_end, "has_ended", lambda process: False)
    with pytest.raises(
        EngineError, match=rf"process group {server.pid} was killed, but has not ended within 0.1 s: \d+, "
    ):
        await server.stop()
    monkeypatch.undo()
    await server.stop()
    assert not runs(server.pid)


def test_a_process_with_only_its_first_thread_ended_still_runs():
    """The system calls it a zombie, and it holds its memory."""
    code = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = psutil.Process(process.pid)
    process.stdout.readline()
    while runs(process.pid):
        pass
    assert not has_ended(seen)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # No process has waited for its exit code yet.
    assert seen.status() == psutil.STATUS_ZOMBIE
    assert has_ended(seen)
    process.wait()
    assert has_ended(seen)
