"""The end of a lost engine's processes on their machine."""

import os
import signal
import subprocess
import sys

import psutil

from slime_ray.actors import StartedProcess
from slime_ray.process_end import end_here
from slime_serving.process_group import has_ended

STARTS_SERVERS = """
import subprocess, time
servers = [subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True) for _ in range(2)]
print(*(server.pid for server in servers), flush=True)
time.sleep(600)
"""


def sleeper():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return process, StartedProcess.of(process.pid)


def test_an_actor_and_its_server_end_though_both_hang():
    (actor, first), (server, second) = sleeper(), sleeper()
    for process in (actor, server):
        os.kill(process.pid, signal.SIGSTOP)
    assert end_here(first, [second], 30) == []
    assert [actor.wait(), server.wait()] == [-signal.SIGKILL] * 2
    assert StartedProcess.of(server.pid) is None
    # Once more: all have ended.
    assert end_here(first, [second], 30) == []


def test_another_process_that_got_the_pid_lives_on():
    actor, server = sleeper(), sleeper()
    others = [StartedProcess(pid=process.pid, started=1.0) for process, _ in (actor, server)]
    assert all(other.is_another for other in others)
    assert end_here(others[0], others[1:], 30) == []
    for process, _ in (actor, server):
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_process_that_does_not_end_is_named(monkeypatch):
    process, started = sleeper()
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    assert end_here(started, [], 0.05) == [started]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_servers_that_an_actor_has_just_started_end_with_it():
    """Nothing has reported them yet. They do not end by themselves."""
    actor = subprocess.Popen([sys.executable, "-c", STARTS_SERVERS], stdout=subprocess.PIPE, text=True)
    servers = [psutil.Process(int(pid)) for pid in actor.stdout.readline().split()]
    assert end_here(StartedProcess.of(actor.pid), [], 30) == []
    actor.communicate()
    assert [has_ended(server) for server in servers] == [True] * 2


def test_all_servers_of_an_actor_that_is_gone_end():
    (actor, first), *servers = [sleeper() for _ in range(3)]
    actor.kill()
    actor.wait()
    assert end_here(first, [started for _, started in servers], 30) == []
    assert [process.wait() for process, _ in servers] == [-signal.SIGKILL] * 2


def test_what_an_attempt_left_another_one_ends():
    """It leads no process group."""
    (actor, first), left = sleeper(), subprocess.Popen(["sleep", "600"])
    actor.kill()
    actor.wait()
    assert end_here(first, [StartedProcess.of(left.pid)], 30) == []
    assert left.wait() == -signal.SIGKILL
