"""The end of a lost engine's processes on their machine."""

import os
import signal
import subprocess

import psutil

from slime_ray.actors import StartedProcess
from slime_ray.process_end import end_here


def sleeper():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return process, StartedProcess.of(process.pid)


def test_an_actor_and_its_server_end_though_both_hang():
    (actor, first), (server, second) = sleeper(), sleeper()
    for process in (actor, server):
        os.kill(process.pid, signal.SIGSTOP)
    assert end_here(first, second, 30) == []
    assert [actor.wait(), server.wait()] == [-signal.SIGKILL] * 2
    assert StartedProcess.of(server.pid) is None
    # Once more: all have ended.
    assert end_here(first, second, 30) == []


def test_another_process_that_got_the_pid_lives_on():
    actor, server = sleeper(), sleeper()
    others = [StartedProcess(pid=process.pid, started=1.0) for process, _ in (actor, server)]
    assert all(other.is_another for other in others)
    assert end_here(*others, 30) == []
    for process, _ in (actor, server):
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_process_that_does_not_end_is_named(monkeypatch):
    process, started = sleeper()
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    assert end_here(started, None, 0.05) == [process.pid]
    process.kill()
    process.wait()
