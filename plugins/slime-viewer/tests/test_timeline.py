"""The timeline of runs whose trainer and engines share devices: sleep, starts, memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written_runs import Asking, write_metrics

from slime_viewer.recorder import turns

Ask = Callable[..., Asking]
GIB = 2**30


def spans_of(found: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    names = [lane["name"] for lane in found["lanes"]]
    rows = zip(found["lane"], found["kind"], found["from"], found["to"], strict=True)
    return {(names[lane], kind): (begin, end) for lane, kind, begin, end in rows}


def write_run(folder: Path, *, times: list[dict[str, Any]], events: list[dict[str, Any]]) -> Path:
    (folder / "view").mkdir(parents=True)
    config = {"launcher": {"colocate": True, "device": "cuda", "actor_num_gpus_per_node": 2, "num_engines": 2,
                           "rollout_num_gpus_per_engine": 1}}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps({"config": config}))
    (folder / "view/times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return folder


def span(lane: str, kind: str, start: float, end: float) -> dict[str, Any]:
    return {"lane": lane, "kind": kind, "from": start, "to": end, "step": 0, "attempt": 1}


RECORDED = [
    span("engines", "rollout", 110, 120),
    span("trainer", "wait", 110, 121),
    {
        "time": 120.5,
        "memory": {"host": [3 * GIB, 64 * GIB], "GPU 1": [70 * GIB, 80 * GIB], "GPU 0": [71 * GIB, 80 * GIB]},
    },
    span("trainer", "train", 121, 130),
    span("trainer", "weights", 130, 133),
    span("engines", "weights", 130, 133),
    {"time": 133.0, "memory": {"host": [5 * GIB, 64 * GIB], "GPU 0": [40 * GIB, 80 * GIB]}},
]


def test_events_of_steps_have_sleep_and_events_of_starts_what_was_loaded(tmp_path: Path, ask: Ask) -> None:
    when = {"time": "2026-01-01T00:00:00+00:00", "attempt": 1}
    start = {"began": 100.0, "seconds": 10.0, "spans": [["driver", 0, 2], ["engine/load", 2, 9], ["eval", 9, 10]]}
    moves = [["rollout", 0, 10], ["engine_sleep", 10, 11], ["wake_up", 11, 12], ["train", 12, 20], ["acme", 20, 21]]
    events = [
        {**when, "event": "run_start", "rollout_id": 0},
        {**when, "event": "start_time", **start},
        {**when, "event": "step_time", "rollout_id": 0, "began": 110.0, "seconds": 21.0, "spans": moves},
        {**when, "event": "step_time", "rollout_id": 1},
    ]
    run = write_run(tmp_path / "run", times=RECORDED, events=events)
    asking = ask(run)
    found = asking("/api/runs/run/timeline", start=90, end=140)
    spans = spans_of(found)
    assert found["source"] == "recorded"
    assert spans["engines", "sleep"] == spans["devices", "sleep"] == (120, 121)
    assert spans["trainer", "wake"] == (121, 122)
    assert spans["engines", "load"] == (102, 109)
    # What slime-viewer recorded is not there twice, and the devices have no waiting.
    assert spans["trainer", "train"] == spans["devices", "train"] == (121, 130)
    assert found["kind"].count("rollout") == found["kind"].count("train") == 2
    assert ("devices", "wait") not in spans
    lanes = {lane["name"]: (lane["devices"], lane["idle"]) for lane in found["lanes"]}
    assert lanes["devices"] == ("1 x 2 GPU", pytest.approx(1 - (7 + 23) / 50))
    assert lanes["engines"] == ("2 x 1 GPU", pytest.approx(1 - (7 + 11 + 3) / 50))
    assert found["memory"] == {
        "time": [120.5, 133.0], "what": ["GPU 0", "GPU 1", "host"], "limit": [80 * GIB, 80 * GIB, 64 * GIB],
        "used": [[71 * GIB, 40 * GIB], [70 * GIB, None], [3 * GIB, 5 * GIB]],
    }  # fmt: skip
    assert asking("/api/runs/run/events")["event"] == ["run_start"]
    # Without what slime-viewer records, events alone.
    (run / "view/times.jsonl").write_text("")
    alone = spans_of(ask(run)("/api/runs/run/timeline", start=90, end=140))
    assert alone["engines", "rollout"] == alone["trainer", "wait"] == (110, 120)
    assert (alone["trainer", "train"], alone["engines", "eval"]) == ((122, 130), (109, 110))


def test_without_events_sleep_is_where_the_order_of_phases_has_it(tmp_path: Path, ask: Ask) -> None:
    """Seconds in a step's metrics: of the update before it, and of its own training."""
    run = write_run(tmp_path / "run", times=[*RECORDED, {**span("trainer", "train", 150, 160), "step": 1}], events=[])
    seconds = {"engine_sleep": 2, "wake_up": 3, "sleep": 1, "engine_wake_up": 0.5}
    perf = {f"perf/{name}_time": float(value) for name, value in seconds.items()}
    write_metrics(run, [("rollout/step", 0, 0, {"perf/step_time": 30.0}), ("rollout/step", 1, 1, perf)])
    spans = spans_of(ask(run)("/api/runs/run/timeline"))
    assert (spans["engines", "sleep"], spans["trainer", "wake"]) == ((148, 150), (150, 153))
    assert (spans["trainer", "sleep"], spans["engines", "wake"]) == ((131.5, 132.5), (132.5, 133))


def test_roles_train_in_turns_where_their_seconds_fit_and_at_once_where_not() -> None:
    perf = {"perf/train_time": 9.0, "perf/critic_train_time": 3.0, "perf/actor_train_time": 5.0}
    assert list(turns(perf, 10, 18)) == [("critic", 10, 13), ("actor", 13, 18)]
    assert list(turns(perf, 10, 15)) == [("critic", 10, 13), ("actor", 10, 15)]
    assert list(turns({"perf/actor_train_time": 5.0}, 10, 15)) == []
