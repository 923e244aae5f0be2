"""Waiting for killed processes."""

import os
import signal
import subprocess
import sys

import pytest

from slime_serving.process_group import has_ended, kill_process_group, processes_of

SPAWNS = (
    "import subprocess, sys; print(subprocess.Popen(['sleep', sys.argv[1]], stdout=subprocess.DEVNULL).pid, flush=True)"
)


@pytest.fixture
def started():
    """`started(seconds)` starts a group: its first process ends, its second one sleeps for `seconds`."""
    groups = []

    def start(seconds):
        words = [sys.executable, "-c", SPAWNS, str(seconds)]
        leader = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, text=True)
        groups.append(leader.pid)
        pid, _ = leader.communicate()
        return leader.pid, int(pid)

    yield start
    for group in groups:
        if not all(map(has_ended, processes_of(group))):
            os.killpg(group, signal.SIGKILL)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_group_exists_as_long_as_any_of_its_processes(started):
    leader, beside = started(600)
    assert not runs(leader)
    assert runs(beside)
    assert kill_process_group(leader, 60) == []
    assert not runs(beside)


def test_a_zombie_counts_as_ended():
    zombie = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    os.killpg(zombie.pid, 0)
    assert all(map(has_ended, processes_of(zombie.pid)))
    zombie.wait()
