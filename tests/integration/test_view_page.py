"""The page of `slime view` over real runs: what a run records for it, while it continues and afterwards; and in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from slime_core.data.table import dump_file, dumped_steps, read_groups, write_groups
from slime_core.data.train_data import read_train_data, train_data_file
from slime_sources.replay_example import example_group

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

ROOT: Final = Path(__file__).parents[2]
SLIME: Final = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
CHROMIUM: Final = "/usr/bin/chromium"
AXE: Final = ROOT / "plugins/slime-viewer/page/node_modules/axe-core/axe.min.js"
HOSTILE: Final = (
    '<img src=x onerror="window.ran=1"></script><script>window.ran=1</script><svg onload="window.ran=1">'
    '<a href="javascript:window.ran=1">here</a>{{constructor.constructor("window.ran=1")()}}'
)
RECORDED: Final = (
    "--num-rollout",
    "3",
    "--eval-interval",
    "1",
    "--get-mismatch-metrics",
    "true",
    "--save-interval",
    "none",
)


@dataclass(frozen=True)
class Served:
    """`slime view`, and a client of it."""

    address: str
    process: subprocess.Popen[str]

    @property
    def token(self) -> str:
        return self.address.partition("#token=")[2]

    @property
    def origin(self) -> str:
        return self.address.partition("/#")[0]

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.origin + path, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())


@contextmanager
def served(*folders: Path, pythonpath: Path | None = None) -> Iterator[Served]:
    """Ends with Ctrl-C, and the exit code is 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    words = [*SLIME, "view", *map(str, folders), "--page", "--no-browser"]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), address
        yield Served(address, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="module")
def recorded(make_tiny: Callable[[Path], Any], warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that dumped nothing, with an evaluation after each step."""
    tiny = make_tiny(tmp_path_factory.mktemp("recorded"))
    tiny.warm = warm
    (tiny / "test.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+1=", "label": str(a + 1)}) + "\n" for a in range(3))
    )
    ended = tiny.run(*RECORDED, "--eval-prompt-data", "a/b", "test.jsonl", "--trace-samples")
    assert ended.code == 0, ended.err
    assert "slime-viewer" not in ended.err
    return tiny.runs / "tiny"


def test_a_run_records_its_samples_and_the_trainers_numbers(
    recorded: Path, make_tiny: Callable[[Path], Any], warm: Any, tmp_path: Path
) -> None:
    """They are those of a run of the same seed that dumps both itself, which records neither."""
    tiny = make_tiny(tmp_path)
    tiny.warm = warm
    ended = tiny.run(*RECORDED[:2], *RECORDED[4:], "--dump-rollouts", "--save-debug-train-data", "--name", "dumped")
    assert ended.code == 0, ended.err
    dumped = tiny.runs / "dumped"
    assert not (dumped / "view" / "groups").exists()
    assert not (dumped / "view" / "tokens").exists()
    assert dumped_steps(recorded / "view" / "groups") == [0, 1, 2]
    for step in range(3):
        mine = [s for g in read_groups(dump_file(recorded / "view" / "groups", step)) for s in g.samples]
        theirs = [s for g in read_groups(dump_file(dumped / "rollouts", step)) for s in g.samples]
        assert [(s.index, s.response, s.reward) for s in mine] == [(s.index, s.response, s.reward) for s in theirs]
    batch, columns = read_train_data(train_data_file(dumped / "train_data", 2))
    assert columns.old_log_probs is not None
    with served(recorded, dumped) as page:
        for run in ("tiny", "dumped"):
            index = int(batch.index[1])
            sample = page.get(f"/api/runs/{run}/sample?index={index}")
            own = slice(batch.response_offsets[1], batch.response_offsets[2])
            values = {column["name"]: column["values"] for column in sample["tokens"]["columns"]}
            np.testing.assert_allclose(values["log_prob"], columns.old_log_probs[own], rtol=1e-6)
            np.testing.assert_allclose(values["advantage"], columns.advantages[own], rtol=1e-6)
            gap = columns.old_log_probs[own].astype(float) - batch.rollout_log_probs[own]
            np.testing.assert_allclose(values["mismatch"], gap, atol=1e-6)
            assert "".join(sample["tokens"]["text"]) == "".join(turn["text"] for turn in sample["turns"])
            assert len(sample["tokens"]["text"]) == len(sample["tokens"]["ids"]) == len(values["mask"])
        assert page.get("/api/runs/tiny/sample?index=1")["calls"][0]["tokens"] > 0
        evaluated = page.get("/api/runs/tiny/steps?set=a/b")
        assert (evaluated["sets"], evaluated["step"]) == (["train", "a/b"], [0, 1, 2, 3])
        evaluated_samples = page.get("/api/runs/tiny/samples?set=a/b&step=last")
        assert len(evaluated_samples["excerpt"]) == 3
        timeline = page.get("/api/runs/tiny/timeline")
        assert timeline["source"] == "recorded"
        for kind in ("rollout", "score", "train", "weights", "eval"):
            assert kind in timeline["kind"]
        assert all(end >= start for start, end in zip(timeline["from"], timeline["to"], strict=True))
        (host,) = page.get("/api/runs/tiny/health")["memory"]
        assert (host["what"], host["planned"]) == ("host", None)
        assert 10**7 < host["measured"] < host["limit"]


def test_the_terminal_and_the_comparison(recorded: Path, warm: Any, tmp_path: Path) -> None:
    code, out, err = warm.run(["compare", str(recorded), str(recorded.parent / "tiny" / "view" / "groups")], tmp_path)
    assert (code, err) == (0, "")
    assert "reward (last 10)" in out
    assert out.splitlines()[0].split() == ["tiny", "groups"]
    code, out, err = warm.run(["view", str(recorded)], tmp_path)
    assert code == 0, err
    assert "step 2 of" in out
    for words, message in (
        (["view", str(recorded), "--step", "1", "--page"], "--step is for the terminal"),
        (["view", str(recorded), str(tmp_path)], "one run can be printed, and there are 2"),
        (["view", "nowhere", "--page"], "nowhere: no such folder. Pass the folder of a run"),
        (["compare", "nowhere"], "nowhere: no such folder"),
    ):
        code, _, err = warm.run(words, tmp_path)
        assert code != 0
        assert message in " ".join(err.replace("│", " ").split())


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(60_000)
    yield context
    context.close()


class Errors(list[str]):
    """Errors of a page's scripts, and what its policy refused."""

    def watch(self, page: Page) -> Page:
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("console", lambda message: self.append(message.text) if message.type == "error" else None)
        return page


def go(page: Page, place: str) -> None:
    page.evaluate("place => { location.hash = place }", f"#/{place}")


def faults(page: Page) -> list[str]:
    """Serious faults of accessibility, by axe."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [
        f"{fault['id']}: {node['html'][:200]}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


VIEWS: Final[dict[str, str]] = {
    "curves": "rollout/raw_reward",
    "rollouts": "",
    "timeline": "engines",
    "health": "Gradient norm",
    "evaluation": "",
    "compare": "reward (last 10)",
}
"""What each view of the page shows; rollouts and evaluation show rows."""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_of_a_real_run_has_no_serious_fault(recorded: Path, browser: Browser, scheme: Any) -> None:
    errors = Errors()
    with served(recorded) as server:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        page = errors.watch(context.new_page())
        page.goto(server.address)
        for view, text in VIEWS.items():
            go(page, view)
            if view in ("rollouts", "evaluation"):
                page.locator("main a.row").first.wait_for()
            else:
                page.locator("main").get_by_text(text, exact=view == "curves").first.wait_for()
            assert faults(page) == [], view
        go(page, "sample?index=1&step=0")
        page.locator("main").get_by_text("train.jsonl").first.wait_for()
        assert faults(page) == []
        assert server.token not in page.url
        context.close()
    assert errors == []


@pytest.mark.browser
def test_rollouts_are_sorted_searched_and_opened(recorded: Path, context: BrowserContext) -> None:
    """The worst sample of a step takes one click; its tokens have their numbers on hover; its address opens it again."""
    from playwright.sync_api import expect

    errors = Errors()
    with served(recorded) as server:
        page = errors.watch(context.new_page())
        page.goto(server.address)
        go(page, "rollouts?step=1")
        rows = page.locator("main a.row")
        rows.first.wait_for()
        for column, ascending in (("reward", True), ("spread", False), ("longest", False)):
            page.get_by_role("columnheader", name=column, exact=True).get_by_role("link").click()
            page.locator(f"th[aria-sort={'ascending' if ascending else 'descending'}]", has_text=column).wait_for()
            order = f"sort={column}&descending={int(not ascending)}"
            expected = server.get(f"/api/runs/tiny/groups?step=1&{order}")["group"]
            expect(rows).to_have_text(list(map(str, expected)))

        page.get_by_role("button", name="worst").click()
        samples = server.get("/api/runs/tiny/samples?step=1&limit=1000")
        worst = min(range(len(samples["at"])), key=lambda row: (samples["reward"][row], -samples["advantage"][row]))
        index = samples["at"][worst]["index"]
        page.get_by_role("heading", name=f"sample {index}").wait_for()
        sample = server.get(f"/api/runs/tiny/sample?step=1&index={index}")
        columns = {column["title"]: column for column in sample["tokens"]["columns"]}
        assert {column["name"] for column in columns.values()} >= {
            "advantage", "log_prob", "rollout_log_prob", "mismatch", "mask", "version",
        }  # fmt: skip
        page.locator("[data-place='0']").hover()
        card = page.get_by_role("tooltip")
        card.locator("dl > div").first.wait_for()
        shown = dict(row.inner_text().split("\n") for row in card.locator("dl > div").all())
        assert list(shown) == list(columns)
        assert float(shown["Advantage"].replace("\u2212", "-")) == pytest.approx(
            columns["Advantage"]["values"][0], rel=1e-3
        )
        for title, column in columns.items():
            page.get_by_role("combobox", name="Color by").select_option(column["name"])
            letter = {"diverging": "d", "sequential": "s", "category": "c"}[column["scale"]]
            page.locator(f"[data-place='0'][class^='{letter}']").wait_for()
            assert f"color={column['name']}" in page.url, title
        page.keyboard.press("#")
        page.locator("[data-place='0'][data-number]").wait_for()
        page.reload()
        page.get_by_role("heading", name=f"sample {index}").wait_for()
        page.locator("[data-place='0'][data-number]").wait_for()

        go(page, "rollouts?step=all&q=%22+%22&where=reward<1")
        page.get_by_role("searchbox", name="Search").or_(page.get_by_label("Search")).first.fill("=")
        page.get_by_label("Filter").fill("reward<1 step=2")
        total = server.get("/api/runs/tiny/samples?step=all&q=%3D&where=reward%3C1%20step%3D2")["total"]
        assert total > 0
        page.get_by_text(f"{total} samples").first.wait_for()
    assert errors == []


@pytest.fixture(scope="module")
def runs(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs. The second has another learning rate, and files as a run on GPUs that trainer and engines share."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        shutil.copytree(recorded, folder / name, ignore=shutil.ignore_patterns("index", "checkpoints"))
    two = folder / "two"
    manifest = json.loads((two / "manifest.json").read_text())
    manifest["config"]["train"]["lr"] = 0.125
    manifest["config"]["launcher"] |= {"colocate": True, "device": "cuda", "actor_num_gpus_per_node": 2}
    (two / "manifest.json").write_text(json.dumps(manifest))
    times = [json.loads(line) for line in (two / "view/times.jsonl").read_text().splitlines()]
    trained = [line for line in times if line.get("kind") == "train"]
    memory = [
        {"time": line[end], "memory": {"host": [4e9, 6e10], "GPU 0": [used, 8e10], "GPU 1": [used / 2, 8e10]}}
        for line in trained
        for end, used in (("from", 5e10), ("to", 7e10))
    ]
    with (two / "view/times.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in memory)
    moved = [["engine_sleep", 0.0, 0.1], ["wake_up", 0.1, 0.2], ["train", 0.2, 0.3]]
    with (two / "events.jsonl").open("a") as file:
        for line in trained:
            event = {"event": "step_time", "rollout_id": line["step"], "began": line["from"] - 0.1, "spans": moved}
            file.write(json.dumps({"time": "2026-01-01T00:00:00+00:00", "attempt": 1, **event}) + "\n")
    plan = {"groups": [{"needed_bytes": 6e10, "host_bytes": 5e9}], "target": {"device": "cuda"}}
    (two / "view/plan.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.browser
def test_runs_are_laid_over_each_other_and_their_configs_compared(runs: Path, context: BrowserContext) -> None:
    errors = Errors()
    with served(runs) as server:
        page = errors.watch(context.new_page())
        page.goto(server.address)
        go(page, "curves?run=one")
        page.get_by_label("Lay two over").check()
        legend = page.locator(".run-legend").or_(page.locator(".runs"))
        legend.get_by_text("two").first.wait_for()
        chart = page.locator("figure.metric", has_text="rollout/raw_reward").first
        chart.get_by_role("img", name=re.compile("one: 3 points.*two: 3 points")).wait_for()
        for axis in ("tokens", "hours"):
            page.get_by_role("button", name=axis).click()
            page.wait_for_url(f"**x={axis}*")
        page.keyboard.press("s")
        page.wait_for_url("**smooth=0.2*")
        assert page.get_by_text("not known for this metric").count() == 0
        go(page, "compare?run=one&over=two")
        page.get_by_role("row", name=re.compile(r"^train\.lr .* 0\.125$")).wait_for()
    assert errors == []


@pytest.mark.browser
def test_a_run_on_gpus_on_a_phone(runs: Path, browser: Browser) -> None:
    """Sleep, memory and plan; no view is wider than the screen."""
    errors = Errors()
    with served(runs) as server:
        context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
        page = errors.watch(context.new_page())
        page.goto(server.address)
        for view, text in {
            **VIEWS,
            "sample?index=1&step=0": "train.jsonl",
            "curves?metric=train/loss": "train/loss",
        }.items():
            go(page, f"{view}{'&' if '?' in view else '?'}run=two")
            page.locator("main").get_by_text(text).first.wait_for()
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") == 390, view
        go(page, "timeline?run=two")
        page.get_by_role("columnheader", name="wake up").wait_for()
        heads = page.get_by_role("columnheader").all_inner_texts()
        devices = page.get_by_role("row", name="devices 1 x 2 GPU").locator("th, td").all_inner_texts()
        assert "ms" in devices[heads.index("sleep")]
        assert "ms" in devices[heads.index("wake up")]
        page.get_by_role("img", name="GPU 0: 6 points, last 65.19").wait_for()
        go(page, "health?run=two")
        row = page.get_by_role("row", name="fullest GPU")
        row.wait_for()
        assert row.inner_text().split("\t")[1:4] == ["55.9 GiB", "65.2 GiB", "74.5 GiB"]
        context.close()
    assert errors == []


# The page asks every two seconds, and a run this small is through in less.
WAITING: Final = """
import pathlib, time
from slime_core.plugin import hook


@hook
def batch_ready(event):
    end = time.monotonic() + 100
    while event.rollout_id == 8 and not pathlib.Path("seen").exists() and time.monotonic() < end:
        time.sleep(0.05)
"""


@pytest.mark.browser
def test_a_run_is_shown_while_it_continues(
    make_tiny: Callable[[Path], Any], context: BrowserContext, tmp_path: Path
) -> None:
    tiny = make_tiny(tmp_path)
    folder = tiny.runs / "tiny"
    folder.mkdir(parents=True)
    errors = Errors()
    with served(folder) as server:
        page = errors.watch(context.new_page())
        page.goto(server.address)
        page.get_by_text("holds no run yet").wait_for()
        (tiny / "waiting.py").write_text(WAITING)
        words = ("--plugin", "waiting.py", "--num-rollout", "12", "--save-interval", "none")
        run = tiny.start("run", "run.toml", *words)
        try:
            page.locator(".state.running").wait_for(timeout=120_000)
            page.get_by_text("rollout/raw_reward", exact=True).first.wait_for()
            page.wait_for_function("() => document.querySelector('.state').textContent.includes('8 of 12')")
            for view, text in VIEWS.items():
                go(page, view)
                page.locator("main").get_by_text(text).first.wait_for()
            go(page, "rollouts")
            page.locator("main a.row").first.wait_for()
        finally:
            (tiny / "seen").touch()
            ended = tiny.end(run)
        assert ended.code == 0, ended.err
        page.locator(".state.finished").wait_for()
    assert errors == []


@pytest.mark.browser
def test_the_token_is_asked_for(recorded: Path, context: BrowserContext) -> None:
    with served(recorded) as server:
        page = context.new_page()
        page.goto(server.origin)
        field = page.get_by_role("textbox")
        field.wait_for()
        assert page.get_by_text("rollout/raw_reward").count() == 0
        assert page.get_by_text("tiny").count() == 0
        assert faults(page) == []
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.origin}/api/runs", timeout=60)
        field.fill(server.token)
        field.press("Enter")
        page.get_by_text("rollout/raw_reward", exact=True).first.wait_for()


@pytest.fixture
def hostile(recorded: Path, tmp_path: Path) -> Path:
    """A run whose names and texts are HTML."""
    folder = tmp_path / "<b>run"
    shutil.copytree(recorded, folder, ignore=shutil.ignore_patterns("index", "checkpoints"))
    groups = []
    for group in (example_group(number, 3) for number in range(2)):
        prompt = replace(
            group.prompt,
            text=HOSTILE,
            label=HOSTILE,
            metadata={HOSTILE: HOSTILE},
            messages=[{"role": HOSTILE, "content": HOSTILE}],
            tools=[{"name": HOSTILE}],
            origin=HOSTILE,
        )
        text = {"response": HOSTILE, "raw_response": HOSTILE, "reward_parts": {HOSTILE: 1.0}, "metadata": {HOSTILE: 1}}
        groups.append(
            replace(group, prompt=prompt, samples=tuple(replace(s, prompt=prompt, **text) for s in group.samples))
        )
    (folder / "rollouts").mkdir()
    write_groups(dump_file(folder / "rollouts", 0), groups)
    metrics = {"axis": "rollout/step", "step": 9, "rollout_id": 9, "attempt": 1, "metrics": {f"rollout/{HOSTILE}": 1.0}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    failed = {"time": "2026-01-01T00:00:00+00:00", "attempt": 1, "event": "engine_lost", "engine": 0, "error": HOSTILE}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    return folder


@pytest.mark.browser
def test_hostile_text_runs_no_script(hostile: Path, context: BrowserContext, tmp_path: Path) -> None:
    errors = Errors()
    exported = tmp_path / "run.html"
    subprocess.run([*SLIME, "view", str(hostile), "--export", str(exported)], check=True, capture_output=True)
    with served(hostile) as server:
        for address in (server.address, exported.as_uri()):
            page = errors.watch(context.new_page())
            requests: list[str] = []
            page.on("request", lambda request, requests=requests: requests.append(request.url))
            page.goto(address)
            page.locator("main").wait_for()
            for view in (*VIEWS, "rollouts?step=0", "rollouts?step=0&list=samples", "sample?index=1&step=0"):
                go(page, view)
                page.wait_for_load_state("networkidle")
                page.locator("main").wait_for()
            page.get_by_text("window.ran=1").first.wait_for()
            assert page.evaluate("window.ran") is None
            assert page.locator("main img, main svg[onload], main a[href^=javascript]").count() == 0
            assert all(url.startswith((server.origin, "file:", "data:", "blob:")) for url in requests)
            page.close()
    assert errors == []


@pytest.mark.browser
@pytest.mark.parametrize("state", ["empty", "broken"])
def test_folders_that_are_no_whole_runs(recorded: Path, context: BrowserContext, tmp_path: Path, state: str) -> None:
    folder = tmp_path / state
    folder.mkdir()
    if state == "broken":
        shutil.copytree(recorded, folder, ignore=shutil.ignore_patterns("index"), dirs_exist_ok=True)
        (folder / "manifest.json").write_text("{")
        for path in (folder / "view" / "groups").iterdir():
            path.write_bytes(path.read_bytes()[:50])
    errors = Errors()
    with served(folder) as server:
        page = errors.watch(context.new_page())
        page.goto(server.address)
        if state == "empty":
            page.get_by_text("holds no run yet").wait_for()
        else:
            page.get_by_text("manifest.json cannot be read").wait_for()
            page.get_by_text("rollout/raw_reward", exact=True).first.wait_for()
            go(page, "rollouts")
            page.get_by_text("cannot be read as Parquet").first.wait_for()
        assert faults(page) == []
        for view in VIEWS:
            go(page, view)
            page.wait_for_load_state("networkidle")
    assert [error for error in errors if "status of 4" not in error] == []


@pytest.mark.browser
def test_a_panel_of_a_plugin(recorded: Path, context: BrowserContext, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "acme_panel-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-panel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime.panels]\nsteps = acme_panel:PANEL\n")
    (site / "acme_panel.py").write_text(
        "import json\n"
        "from slime_viewer.panel import Panel\n"
        "def data(folder):\n"
        "    return {'steps': json.loads((folder / 'summary.json').read_text())['steps']}\n"
        "MODULE = 'export default (element, data) => { element.textContent = `There are ${data.steps} steps.`; }'\n"
        "PANEL = Panel(title='Acme', data=data, module=MODULE)\n"
    )
    exported = tmp_path / "run.html"
    words = [*SLIME, "view", str(recorded), "--export", str(exported)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(site)})
    errors = Errors()
    with served(recorded, pythonpath=site) as server:
        for address in (server.address, exported.as_uri()):
            page = errors.watch(context.new_page())
            page.goto(address)
            page.get_by_role("link", name="Acme").click()
            page.get_by_text("There are 3 steps.").wait_for()
            page.close()
    assert errors == []
