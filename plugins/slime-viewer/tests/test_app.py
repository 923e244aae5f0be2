"""The page's addresses: who may read them, what they reply for folders in any state."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import TOKEN, Asking, make_groups, write_metrics

from slime_core.data.table import dump_file, write_groups
from slime_core.errors import ConfigError
from slime_viewer.export import hash_source, write_export
from slime_viewer.panel import InstalledPanel, Panel
from slime_viewer.replies import OF_RUN
from slime_viewer.run_list import RunList

Ask = Callable[..., Asking]
RUN = "/api/runs/a run"


def test_data_need_the_token(run_folder: Path, ask: Ask) -> None:
    client = ask(run_folder).client
    for path in ("/api/runs", f"{RUN}/metrics", "/api/nothing"):
        for headers in (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": TOKEN},
            {"Authorization": f"bearer {TOKEN}"},
        ):
            reply = client.get(path, headers=headers)
            assert (reply.status_code, list(reply.json())) == (401, ["error"])
        assert client.get(path, params={"token": TOKEN}).status_code == 401
    assert client.post("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 405


def test_the_bundle_is_served_under_a_strict_policy(run_folder: Path, ask: Ask) -> None:
    client = ask(run_folder).client
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for file in re.findall(r'(?:src|href)="\./([^"]+)"', page.text):
        assert client.get(f"/{file}").status_code == 200
    for path in ("/../app.py", "/%2e%2e/app.py", "/assets/../../app.py", "//etc/passwd"):
        assert client.get(path).status_code == 404
    assert client.get("/", headers={"host": "attacker.example"}).status_code == 400


def test_the_list_of_runs(run_folder: Path, ask: Ask) -> None:
    (run,) = ask(run_folder)("/api/runs")["runs"]
    assert (run["id"], run["name"], run["state"], run["problem"], run["steps"], run["num_rollout"]) == (
        "a run", "written", "finished", None, 2, 2,
    )  # fmt: skip
    assert run["has"] == {
        "metrics": True, "samples": True, "tokens": False, "evals": False, "timeline": True, "events": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([("run_start", None)], "stopped"),
        ([("run_start", None), ("run_end", None)], "finished"),
        ([("run_start", None), ("run_end", "Interrupted: while generating")], "stopped"),
        ([("run_start", None), ("run_end", "TrainingError: not finite")], "failed"),
    ],
)
def test_the_state_of_a_run(run_folder: Path, ask: Ask, events: list[tuple[str, str | None]], state: str) -> None:
    time = "2026-01-01T00:00:00.000+00:00"
    lines = [{"time": time, "attempt": 1, "event": event, "rollout_id": 0, "error": error} for event, error in events]
    (run_folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = ask(run_folder)("/api/runs")["runs"]
    assert (run["state"], run["attempts"], run["started"]) == (state, 1, 1767225600.0)


def test_an_empty_folder_has_empty_replies(tmp_path: Path, ask: Ask) -> None:
    asking = ask(tmp_path)
    (run,) = asking("/api/runs")["runs"]
    assert run["state"] == "empty"
    base = f"/api/runs/{run['id']}"
    assert asking(f"{base}/steps")["step"] == []
    assert asking(f"{base}/metrics") == {"metrics": []}
    assert asking(f"{base}/timeline")["lanes"] == []
    assert asking(f"{base}/events")["total"] == 0
    assert asking(f"{base}/health")["findings"] == []
    assert "has none" in asking(f"{base}/groups", 404)["error"]
    assert "has none" in asking(f"{base}/sample", 404, index=3)["error"]


def test_a_broken_folder_is_named_and_the_rest_is_shown(run_folder: Path, ask: Ask) -> None:
    (run_folder / "manifest.json").write_text("{")
    (run_folder / "events.jsonl").write_bytes(b"\xff\n")
    whole = dump_file(run_folder / "rollouts", 1)
    whole.write_bytes(whole.read_bytes()[:100])
    dump_file(run_folder / "rollouts", 2).write_bytes(b"")
    asking = ask(run_folder)
    (run,) = asking("/api/runs")["runs"]
    assert run["state"] == "broken"
    assert run["problem"].startswith("manifest.json cannot be read")
    assert "step_000001.parquet cannot be read as Parquet" in asking(f"{RUN}/groups", 422, step=1)["error"]
    assert asking(f"{RUN}/groups", step=0)["group"] == [0, 1]
    asking(f"{RUN}/groups", 422, step=2)
    steps = asking(f"{RUN}/steps")
    assert (steps["step"], [one["step"] for one in steps["unreadable"]]) == ([0], [1, 2])
    assert asking(f"{RUN}/series", names="train/loss")["series"]["train/loss"]["value"] == [0.5, 0.25]
    # It is written anew: the next reply has it.
    write_groups(whole, make_groups(1, [["here"]]))
    assert asking(f"{RUN}/groups", step=1)["group"] == [10]


def test_a_run_that_continues(run_folder: Path, ask: Ask) -> None:
    asking = ask(run_folder)
    asking(f"{RUN}/steps")
    cursor = asking("/api/changes")["cursor"]
    assert asking("/api/changes", cursor=cursor) == {"cursor": cursor, "changed": []}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"axis": "train/step", "step": 2, ')
    assert asking(f"{RUN}/series", names="train/loss")["series"]["train/loss"]["step"] == [0, 1]
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('"rollout_id": 2, "attempt": 1, "metrics": {"train/loss": 0.125}}\n')
    assert asking(f"{RUN}/series", names="train/loss")["series"]["train/loss"]["step"] == [0, 1, 2]
    changes = asking("/api/changes", cursor=cursor)
    assert changes["changed"] == [{"run": "a run", "parts": ["metrics", "timeline"]}]
    write_groups(dump_file(run_folder / "rollouts", 2), make_groups(2, [["new"]]))
    changes = asking("/api/changes", cursor=changes["cursor"])
    assert changes["changed"] == [{"run": "a run", "parts": ["samples"]}]
    assert asking(f"{RUN}/samples", step="last")["excerpt"] == ["new"]


def test_one_sample(run_folder: Path, ask: Ask) -> None:
    asking = ask(run_folder)
    found = asking(f"{RUN}/sample", index=103, part=1)
    assert (found["at"], found["reward"], found["parts"], found["label"], found["trains"]) == (
        {"step": 1, "index": 103, "part": 1}, 1.0, {"format": 0.5}, "label 1", True,
    )  # fmt: skip
    assert [(s["at"]["index"], s["at"]["part"], s["reward"]) for s in found["siblings"]] == [
        (103, 0, 0.0),
        (103, 1, 1.0),
    ]
    assert [(turn["start"], turn["end"], turn["by"], turn["version"]) for turn in found["turns"]] == [
        (0, 2, "policy", 2), (2, 3, "environment", None), (3, 4, "policy", 3),
    ]  # fmt: skip
    columns = {column["name"]: column["values"] for column in found["tokens"]["columns"]}
    assert columns == {
        "rollout_log_prob": [-1, -2, None, -4], "mask": [1, 1, 0, 1], "version": [2, 2, None, 3],
    }  # fmt: skip
    assert "its model is not there" in found["tokens"]["problem"]
    assert "no sample 7 in train; there are 0 to 103" in asking(f"{RUN}/sample", 404, index=7)["error"]
    assert "step 5 of train is not there; there are 2, 0 to 1" in asking(f"{RUN}/sample", 404, index=1, step=5)["error"]
    assert asking(f"{RUN}/sample", index=3)["reward"] is None
    assert "index" in asking(f"{RUN}/sample", 400)["error"]


@pytest.mark.parametrize(
    ("path", "parameters", "status", "message"),
    [
        ("/api/runs/other/steps", {}, 404, "no run 'other'; there are a run."),
        (f"{RUN}/nothing", {}, 404, "'nothing' is not known; there are config"),
        (f"{RUN}/groups", {"step": "x"}, 400, "step=x: no number"),
        (f"{RUN}/groups", {"limit": "-1"}, 400, "limit=-1: no whole number"),
        (f"{RUN}/steps", {"set": "../.."}, 404, "no samples of '../..'; there are train."),
        (f"{RUN}/panels/none", {}, 404, "no panel 'none'"),
        ("/api/compare", {"runs": "a run,other"}, 404, "other"),
    ],
)
def test_what_is_asked_wrongly_is_named(
    run_folder: Path, ask: Ask, path: str, parameters: dict[str, str], status: int, message: str
) -> None:
    assert message in ask(run_folder)(path, status, **parameters)["error"]


def test_runs_beside_each_other(run_folder: Path, tmp_path: Path, ask: Ask) -> None:
    other = tmp_path / "b" / "a run"
    other.mkdir(parents=True)
    write_metrics(other, [("rollout/step", 0, 0, {"rollout/raw_reward": 0.9})])
    (other / "manifest.json").write_text(json.dumps({"config": {"train": {"lr": 0.2}}}))
    asking = ask(run_folder, other)
    assert [run["id"] for run in asking("/api/runs")["runs"]] == ["a run", "a run~2"]
    assert asking("/api/config-difference") == {
        "runs": ["a run", "a run~2"], "keys": ["name", "train.lr", "train.num_rollout"],
        "values": [["written", None], [0.1, 0.2], [2, None]], "there": [[True, False], [True, True], [True, False]],
    }  # fmt: skip
    rows = {row["name"]: row["values"] for row in asking("/api/compare", runs="a run~2,a run")["rows"]}
    assert rows["reward (last 10)"] == [0.9, 0.5]
    assert rows["train.lr"] == ["0.2", "0.1"]
    with pytest.raises(ConfigError, match="no such folder"):
        RunList([tmp_path / "nowhere"])


def test_a_folder_of_runs_is_read_as_the_runs_in_it(run_folder: Path, tmp_path: Path, ask: Ask) -> None:
    asking = ask(tmp_path)
    cursor = asking("/api/changes")["cursor"]
    assert [run["id"] for run in asking("/api/runs")["runs"]] == ["a run"]
    assert asking(f"{RUN}/groups", step=0)["group"] == [0, 1]
    later = tmp_path / "later"
    later.mkdir()
    (later / "manifest.json").write_text("{}")
    os.utime(later / "manifest.json", (2e9, 2e9))
    assert [run["id"] for run in asking("/api/runs")["runs"]] == ["later", "a run"]
    assert [changed["run"] for changed in asking("/api/changes", cursor=cursor)["changed"]] == ["later"]


def test_metrics_have_the_meaning_of_the_reference(run_folder: Path, ask: Ask) -> None:
    names = ("rollout/response_len/max", "eval/test-pass@4", "train/critic-pg_loss", "acme/metric")
    write_metrics(run_folder, [("rollout/step", 2, 2, dict.fromkeys(names, 1.0))])
    found = {metric["name"]: metric["meaning"] for metric in ask(run_folder)(f"{RUN}/metrics")["metrics"]}
    assert found["rollout/raw_reward"] == "mean reward of the scored samples, before shaping (reward)"
    assert found["eval/test"] == "mean reward; a sample without a reward counts as 0 (reward)"
    assert [found[name] for name in names] == [
        "trained tokens of a sample (tokens): largest",
        "estimate of the share of prompts with a passing response among K (pass_threshold) (share)",
        "the policy loss alone, after corrections (loss); of the critic",
        None,
    ]


def test_a_panel(run_folder: Path, ask: Ask) -> None:
    panel = Panel(
        title="Sizes", data=lambda folder: {"files": len(list(folder.iterdir()))}, module="export default () => {}"
    )
    broken = replace(panel, data=lambda folder: {}["missing"])
    panels = {
        "sizes": InstalledPanel("sizes", "acme 1.0", panel),
        "broken": InstalledPanel("broken", "acme 1.0", broken),
    }
    asking = ask(run_folder, panels=panels)
    error = asking(f"{RUN}/panels/broken", 422)["error"]
    assert error.startswith("panel \"broken\" of acme 1.0: KeyError: 'missing' (")
    assert asking("/api/runs")["panels"][0] == {"name": "sizes", "title": "Sizes", "from": "acme 1.0"}
    assert asking(f"{RUN}/panels/sizes") == {"data": {"files": 3}}
    module = asking.client.get("/panels/sizes.js")
    assert (module.text, module.headers["content-type"].partition(";")[0]) == (panel.module, "text/javascript")


def test_the_timeline_from_metrics(run_folder: Path, ask: Ask) -> None:
    """By hand: steps of an hour and of half an hour; each waits for 600 s and trains for 1000 s, of which 100 are scoring."""
    perf = {"perf/step_time": 1800.0, "perf/rollout_time": 600.0, "perf/train_time": 1000.0, "perf/score_time": 100.0}
    (run_folder / "metrics.jsonl").unlink()
    write_metrics(
        run_folder, [("rollout/step", 0, 0, {**perf, "perf/step_time": 3600.0}), ("rollout/step", 1, 1, perf)]
    )
    found = ask(run_folder)(f"{RUN}/timeline")
    spans = {
        (found["lanes"][lane]["name"], kind, step): (begin, end)
        for lane, kind, step, begin, end in zip(
            found["lane"], found["kind"], found["step"], found["from"], found["to"], strict=True
        )
    }
    assert found["source"] == "estimated"
    assert spans["engines", "rollout", 1] == spans["trainer", "wait", 1] == (3600, 4200)
    assert spans["trainer", "score", 1] == (4400, 4500)
    assert spans["trainer", "train", 1] == (4500, 5400)
    idle = {lane["name"]: lane["idle"] for lane in found["lanes"]}
    assert idle == pytest.approx({"engines": 1 - 1200 / 5400, "trainer": 1 - 2000 / 5400})


def test_an_export_holds_the_replies_and_runs_no_text_of_a_sample(run_folder: Path, tmp_path: Path, ask: Ask) -> None:
    hostile = "</script><script>alert(1)</script><!-- <script>"
    write_groups(dump_file(run_folder / "rollouts", 1), make_groups(1, [[hostile]]))
    asking = ask(run_folder)
    path = tmp_path / "run.html"
    write_export(asking.page, path)
    text = path.read_text()
    assert hostile not in text
    data = re.search(r'<script type="application/json" id="slime-export">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    replies = json.loads(data[1])["replies"]
    assert replies["/api/runs"]["exported"] is True
    assert replies["/api/runs/a%20run/sample?index=100&step=1"] == asking(f"{RUN}/sample", index=100)
    assert replies["/api/runs/a%20run/groups?step=0"]["group"] == [0, 1]
    listed = replies["/api/runs/a%20run/samples?limit=100000"]
    assert [at["index"] for at in listed["at"]] == [0, 2, 1, 3, 100]
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert len(scripts) == 1
    assert hash_source(scripts[0]) in text.partition("<body>")[0]
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_every_reply_is_in_the_types_of_the_page() -> None:
    types = (Path(__file__).parents[1] / "page" / "src" / "api.ts").read_text()
    for name in OF_RUN:
        assert f"GET /api/runs/{{id}}/{name}" in types
