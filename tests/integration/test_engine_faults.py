"""Engines that are killed or hang during a rollout: the run continues with the others and ends as if nothing had failed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

STEPS = 4
PER_STEP = 6
SAMPLES = 4

VANDAL = '''
"""Stops engines (SIGSTOP) when step 1 begins, so that their requests stay unserved, and kills some of them a little
after they got requests. None is restarted before all of them are lost."""
import asyncio, os, signal, time
from pathlib import Path
import psutil
from slime_core.plugin import hook, reward

STOPPED, KILLED, ASKED = {stopped}, {killed}, {asked}
FOLDER = Path("{folder}")
BACK, LOST = FOLDER / "back", FOLDER / "lost"

# In the process of a successor.
while (FOLDER / "begun").exists() and not (LOST.exists() and len(LOST.read_text()) >= STOPPED):
    time.sleep(0.05)


def kill_when_asked(pids):
    """Soon after the last of the step's requests was given to an engine: what is lost with them is certain."""
    from slime_core.rollout.client import EngineClient

    stream, asked = EngineClient._stream, 0

    def counted(client, seat, message, requests):
        nonlocal asked
        asked += len(requests)
        if asked == ASKED:
            for pid in pids:
                asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGKILL)
        return stream(client, seat, message, requests)

    EngineClient._stream = counted


@hook
def rollout_start(event):
    if event.rollout_id != 1:
        return
    (FOLDER / "begun").touch()
    children = psutil.Process().children(recursive=True)
    engines = sorted(child.pid for child in children if "EngineActor" in " ".join(child.cmdline()))
    (event.run.run_dir / "engines").write_text(" ".join(map(str, engines)))
    for pid in engines[:STOPPED]:
        os.kill(pid, signal.SIGSTOP)
    kill_when_asked(engines[:KILLED])


@hook
def engine_lost(event):
    with LOST.open("a") as file:
        file.write("x")


@hook
def engine_recovered(event):
    with BACK.open("a") as file:
        file.write("x")


@reward("parity")
def parity(sample):
    """Step 2 does not end before all engines are back, so that they are seen to serve."""
    while sample.group_index >= 12 and not (BACK.exists() and len(BACK.read_text()) == STOPPED):
        time.sleep(0.1)
    return float(sample.index % 2)
'''


def run(tiny: TinyRun, *words: str, stopped: int, killed: int) -> list[dict[str, Any]]:
    """The events of a run that ends well."""
    asked = PER_STEP * SAMPLES
    vandal = VANDAL.format(stopped=stopped, killed=killed, asked=asked, folder=tiny.folder)
    (tiny / "vandal.py").write_text(vandal)
    ended = tiny.run(
        "--plugin", "vandal.py", "--reward", "parity", "--launcher", "ray", "--rollout-num-gpus", "2", "--dump-rollouts",
        "--reward-timeout", "200",
        "--num-rollout", str(STEPS), "--rollout-batch-size", str(PER_STEP), "--n-samples-per-prompt", str(SAMPLES),
        "--rollout-max-response-len", "12", *words,
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, ""), ended.err
    return [json.loads(line) for line in (tiny.runs / "tiny/events.jsonl").read_text().splitlines()]


def only(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def old_pids(tiny: TinyRun) -> list[int]:
    return [int(pid) for pid in (tiny.runs / "tiny/engines").read_text().split()]


def forget_log(lost: dict[str, Any]) -> None:
    """The log that an error quotes is kept, in the folder of the private cluster."""
    log = Path(lost["error"].partition("Last lines of ")[2].partition(":\n")[0])
    assert log.is_file()
    shutil.rmtree(log.parents[3])


def require_every_group_once(tiny: TinyRun) -> None:
    """Checks groups by id over all steps: none is lost, none is trained twice, and no response is missing."""
    trained = []
    for step in range(STEPS):
        table = pyarrow.parquet.read_table(tiny.runs / f"tiny/rollouts/step_{step:06d}.parquet").to_pydict()
        trained += table["index"]
        assert sorted(set(table["group_index"])) == list(range(step * PER_STEP, (step + 1) * PER_STEP))
        assert all(tokens for tokens in table["tokens"])
    assert sorted(trained) == list(range(STEPS * PER_STEP * SAMPLES))
    assert tiny.steps() == tiny.steps("train/step") == list(range(STEPS))


def require_counted(tiny: TinyRun, *, restarts: int, redispatched: int) -> None:
    rows = [record["metrics"] for record in tiny.metrics() if record["axis"] == "rollout/step"]
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == restarts
    assert sum(row.get("rollout/redispatched", 0) for row in rows) == redispatched


def test_an_engine_that_is_killed_is_replaced(tiny: TinyRun) -> None:
    events = run(tiny, stopped=1, killed=1)
    (lost,), (restarted,), (recovered,) = (
        only(events, f"engine_{what}") for what in ("lost", "restarted", "recovered")
    )
    old = old_pids(tiny)
    assert f"pid {old[0]}) is gone" in lost["error"]
    # These requests were in flight when the engine died.
    assert lost["redispatched"] == PER_STEP * SAMPLES // 2
    assert restarted["pid"] not in old
    assert lost["engine"] == restarted["engine"] == recovered["engine"]
    assert recovered["version"] >= 1
    assert only(events, "run_end")[0]["error"] is None
    require_every_group_once(tiny)
    require_counted(tiny, restarts=1, redispatched=lost["redispatched"])
    forget_log(lost)


def test_all_engines_are_lost_one_by_death_and_one_hanging(tiny: TinyRun) -> None:
    """One step ahead. The requests of both wait until an engine is back."""
    words = ("--max-async-level", "1", "--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "20")
    events = run(tiny, *words, stopped=2, killed=1)
    dead, hung = only(events, "engine_lost")
    # For a while there was no engine.
    assert [event["event"] for event in events if event["event"].startswith("engine_")][:2] == ["engine_lost"] * 2
    assert "is gone" in dead["error"]
    assert "did not respond to the health check within 20 s" in hung["error"]
    # The second engine had requests of its own, and may have got those of the first.
    half = PER_STEP * SAMPLES // 2
    assert (dead["redispatched"], hung["redispatched"]) in [(half, half), (half, 2 * half)]
    restarted = only(events, "engine_restarted")
    assert len({event["pid"] for event in restarted} - set(old_pids(tiny))) == len(restarted) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in old_pids(tiny))
    assert [event["engine"] for event in only(events, "engine_recovered")].count(hung["engine"]) == 1
    require_every_group_once(tiny)
    require_counted(tiny, restarts=2, redispatched=dead["redispatched"] + hung["redispatched"])
    forget_log(dead)
