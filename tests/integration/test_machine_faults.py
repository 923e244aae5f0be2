"""Processes of a run that are killed or stop, and a machine that is lost: within bounded time the run continues, or ends with
an error that names what is gone, and the same command continues it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from slime_ray.cluster import PRIVATE_ENVIRONMENT, environment, loopback_only
from slime_serving.process_group import has_ended

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

LIMIT_S = 200.0
RANKS = '''
"""The first time, kills a rank when step 2 is collected. The next time, stops it for a while when step 3 is, and waits for the
test when step 4 is."""
import os, signal, threading, time
from pathlib import Path
import psutil
from slime_core.plugin import hook

FOLDER = Path("{folder}")


def stop_for_a_while(rank):
    os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(2)
    (FOLDER / "stopped").write_text(rank.status())
    os.kill(rank.pid, signal.SIGCONT)


@hook
def rollout_end(event):
    children = psutil.Process().children(recursive=True)
    rank = next(child for child in children if "TrainActor" in " ".join(child.cmdline()))
    killed = FOLDER / "killed"
    if event.rollout_id == 2 and not killed.exists():
        killed.write_text(str(rank.pid))
        os.kill(rank.pid, signal.SIGKILL)
    elif event.rollout_id == 3:
        threading.Thread(target=stop_for_a_while, args=(rank,)).start()
    while event.rollout_id == 4 and not (FOLDER / "continued").exists():
        time.sleep(0.05)
'''
WAITS = '''
"""Step 3 does not end before the engine is back."""
import time
from pathlib import Path
from slime_core.plugin import hook, reward

BACK = Path("{folder}") / "back"


@hook
def engine_recovered(event):
    BACK.touch()


@reward("parity")
def parity(sample):
    while sample.group_index >= 6 and not BACK.exists():
        time.sleep(0.1)
    return float(sample.index % 2)
'''


def until(reached: Callable[[], Any], run: Any) -> None:
    """Waits for something that happens while `run` continues."""
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        if run.poll() is not None:
            pytest.fail("\n".join(run.communicate()))
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_is_killed_ends_the_run_and_one_that_stops_does_not(tiny: TinyRun) -> None:
    (tiny / "ranks.py").write_text(RANKS.format(folder=tiny.folder))
    words = ("run", "run.toml", "--plugin", "ranks.py", "--launcher", "ray", "--actor-num-gpus-per-node", "2")
    ended = tiny.slime(*words)
    killed = int((tiny / "killed").read_text())
    assert ended.code == 6
    assert re.match(rf"trainer actor, rank [01] of 2 \(node 127\.0\.0\.1, pid {killed}\) is gone: ", ended.error)
    assert not psutil.pid_exists(killed)
    # What was trained is saved, and the same command continues from there.
    assert tiny.checkpoints()[-1] == "step_2"
    shutil.rmtree(log_in(ended.error).parents[3])

    driver = tiny.start(*words)
    until(lambda: tiny.steps_so_far().count(2), driver)
    os.kill(driver.pid, signal.SIGSTOP)
    time.sleep(2)
    assert psutil.Process(driver.pid).status() == psutil.STATUS_STOPPED
    os.kill(driver.pid, signal.SIGCONT)
    (tiny / "continued").touch()
    ended = tiny.end(driver, LIMIT_S)
    assert (ended.code, ended.err) == (0, "")
    assert (tiny / "stopped").read_text() == psutil.STATUS_STOPPED
    assert tiny.steps() == tiny.steps("train/step") == [0, 1, 2, 3, 4]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Ray's processes of several machines, here on one, at the loopback address."""
    # For the driver, which is a process of its own: else Ray replaces the loopback address.
    settings = {**PRIVATE_ENVIRONMENT, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with environment(settings), loopback_only():
        cluster = Cluster()
        try:
            yield cluster
        finally:
            cluster.shutdown()


def machine(cluster: Cluster) -> Any:
    """Starts one with room for one worker."""
    options = {"include_dashboard": False} if cluster.head_node is None else {}
    return cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1", **options)


def processes(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [*raylet.children(recursive=True), raylet]


def holds(node: Any, actor: str) -> bool:
    return any(actor in " ".join(process.cmdline()) for process in processes(node))


def test_an_engine_whose_machine_is_lost_starts_on_another(tiny: TinyRun, cluster: Cluster) -> None:
    (tiny / "waits.py").write_text(WAITS.format(folder=tiny.folder))
    head = machine(cluster)
    driver = tiny.start(
        *("run", "run.toml", "--plugin", "waits.py", "--reward", "parity", "--reward-timeout", "200"),
        *("--launcher", "ray", "--launcher.address", cluster.address),
    )
    try:
        until(lambda: holds(head, "TrainActor"), driver)
        lost = machine(cluster)
        until(tiny.steps_so_far, driver)
        assert holds(lost, "EngineActor")
        machine(cluster)
        gone = processes(lost)
        for process in gone:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        ended = tiny.end(driver, LIMIT_S)
    finally:
        driver.kill()
    assert all(map(has_ended, gone))
    assert ended.code == 0, ended.err
    events = [json.loads(line) for line in (tiny.runs / "tiny/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"].startswith("engine_")] == [
        *("engine_lost", "engine_restarted", "engine_recovered")
    ]
    assert tiny.steps() == tiny.steps("train/step") == [0, 1, 2, 3, 4]


def log_in(error: str) -> Path:
    """The log that an error quotes, in the folder of the private cluster."""
    return Path(error.partition("Last lines of ")[2].partition(":\n")[0])
