"""Runs with rollout workers: the groups of a run without them, also after a worker or the run was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

STEPS = 4
WORDS = (
    "--engine", "sglang", "--rollout-max-response-len", "40", "--rollout-batch-size", "6", "--n-samples-per-prompt", "2",
    "--num-rollout", str(STEPS), "--dump-rollouts", "--reward", "even", "--plugin", "even.py",
)  # fmt: skip
EVEN = """
import pathlib, time
from slime_core.plugin import reward

@reward("even")
def even(sample):
    # Six groups are a step.
    hold = pathlib.Path(f"hold-{sample.group_index // 6}")
    while hold.exists():
        pathlib.Path("held").touch()
        time.sleep(0.01)
    return {"score": float(sample.response_tokens.sum() % 2), "length": float(sample.response_length)}
"""

DEADLY = """
import os
from slime_core.plugin import generator

@generator("deadly")
async def deadly(episode):
    os._exit(7)
"""
CLOSED = """
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.errors import PluginError
from slime_core.plugin import driver

class Closed(Generator):
    async def open(self):
        raise PluginError("the tool is not there. Start it.")

    async def generate(self, episode):
        return []

@driver("slime.generators", "closed")
class ClosedDriver(GeneratorDriver):
    @classmethod
    def build(cls, config):
        return Closed()
"""

JUDGED = """
import json, urllib.request
from slime_core.contracts.reward import Reward, RewardDriver
from slime_core.plugin import driver

class Judged(Reward):
    def __init__(self, servers):
        self.url = servers[0].url

    def score(self, group):
        return [self.asked(sample.tokens.tolist()) for sample in group.samples]

    def asked(self, tokens):
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 3, "sampling_seed": sum(tokens)}}
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return float(sum(json.load(response)["output_ids"]))

@driver("slime.rewards", "judged")
class JudgedDriver(RewardDriver):
    @classmethod
    def build(cls, config):
        raise AssertionError("it has servers")

    @classmethod
    def needs_reward_model(cls, config):
        return True

    @classmethod
    def build_with_servers(cls, config, servers):
        return Judged(servers)
"""

FAULTY = """
from slime_core.plugin import generator, reward
from slime_core.types import Status

@reward("strict")
def strict(sample):
    if sample.group_index == 8:
        raise ValueError("no number")
    return 0.0

@generator("shaky")
async def shaky(episode):
    # Every first attempt at one prompt in four fails.
    if episode.prompt.group_index % 4 == 1 and not episode.attempt:
        raise KeyError("tool")
    response = episode.trajectory()
    response.append_completion(await episode.complete(response.tokens))
    return [response.finish()]
"""
COUNTING = """
from collections import defaultdict
from dataclasses import replace
from slime_core.plugin import generator

@generator("counting")
async def counting(episode):
    response = episode.trajectory()
    response.append_completion(await episode.complete(response.tokens))
    return [replace(response.finish(), metadata=defaultdict(lambda: 0, turns=1))]
"""
STUCK = """
import time
from pathlib import Path
from slime_core.plugin import generator

@generator("stuck")
async def stuck(episode):
    response = episode.trajectory()
    response.append_completion(await episode.complete(response.tokens))
    if episode.prompt.group_index == 7 and not Path("was-stuck").exists():
        Path("was-stuck").touch()
        time.sleep(1000)
    return [response.finish()]
"""
OWN_LOOP = """
import json, sys
import slime_core

changes = {
    "engine": {"name": "sglang", "external_engine_addrs": [sys.argv[2]]}, "plugin": ["even.py"], "reward": "even",
    "rollout.rollout_batch_size": 6, "rollout.rollout_max_response_len": 40, "rollout.rollout_workers": int(sys.argv[1]),
    "name": "own" + sys.argv[1],
}
if __name__ == "__main__":
    with slime_core.open_session("run.toml", overrides=changes) as session:
        groups = session.score(session.sample())
        print(json.dumps([[sample.tokens.tolist(), sample.reward] for group in groups for sample in group.samples]))
"""


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, ...]]]:
    """Starts a server (`reproducible_server.py`); returns the flags of a run that asks it."""
    started: list[subprocess.Popen[str]] = []

    def start(seconds_per_token: float = 0.0002, failing: int = 0) -> tuple[str, ...]:
        server = Path(__file__).with_name("reproducible_server.py")
        command = [sys.executable, str(server), str(seconds_per_token), str(failing)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return "--sglang-external-engine-addrs", f"127.0.0.1:{int(started[-1].stdout.readline())}"

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def prepared(tiny: TinyRun, tiny_forks: None) -> TinyRun:
    (tiny / "even.py").write_text(EVEN)
    text = (tiny / "run.toml").read_text()
    (tiny / "run.toml").write_text(text.replace("[rollout]", '[rollout]\nreward_key = "score"'))
    return tiny


def groups_of(tiny: TinyRun, run: str = "tiny") -> list[list[dict[str, Any]]]:
    """The rows of the dumped groups, by step."""
    dumps = sorted((tiny.runs / run / "rollouts").glob("*.parquet"))
    return [pyarrow.parquet.read_table(path).to_pylist() for path in dumps]


def events(tiny: TinyRun, run: str = "tiny") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tiny.runs / run / "events.jsonl").read_text().splitlines()]


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes of rollout workers; spawned ones have their name nowhere but in the order of their start."""
    children = [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]
    return sorted(children, key=lambda child: child.create_time())


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def held_at(tiny: TinyRun, step: int) -> Path:
    """The rewards of the step wait until this file is deleted; `held` exists as soon as one does."""
    hold = tiny.folder / f"hold-{step}"
    hold.touch()
    return hold


def steps_of(tiny: TinyRun, run: str) -> int:
    path = tiny.runs / run / "metrics.jsonl"
    return path.read_text().count('"rollout/step"') if path.exists() else 0


def test_workers_make_the_groups_of_a_run_without_them(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """With evaluation, whose groups the same workers have."""
    address = serve()
    evaluation = "--set", 'eval.datasets={all={path="train.jsonl",reward="even",n_samples_per_eval_prompt=3}}'
    for count in (0, 2):
        words = "--name", f"with-{count}", "--rollout-workers", str(count), "--eval-interval", "2", *evaluation
        ended = prepared.run(*WORDS, *address, *words)
        assert ended.code == 0, ended.err
    plain, divided = (groups_of(prepared, f"with-{count}") for count in (0, 2))
    assert len(plain) == STEPS
    assert len({tuple(row["tokens"]) for row in plain[0]}) > 6
    assert plain == divided
    kinds = [[event["event"] for event in events(prepared, f"with-{count}")] for count in (0, 2)]
    assert kinds[0] == kinds[1]
    without, evaluated = (eval_metrics(prepared, f"with-{count}") for count in (0, 2))
    assert len(without) > 1
    assert without == evaluated


def test_rewards_in_workers_ask_the_reward_model(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    (prepared / "judged.py").write_text(JUDGED)
    address, (_, judge) = serve(), serve()
    text = (prepared / "run.toml").read_text().replace('reward_key = "score"', "")
    folder = re.search(r'hf_checkpoint = (".*?")', text)
    assert folder is not None
    engine = f'{{ name = "sglang", external_engine_addrs = ["{judge}"] }}'
    (prepared / "run.toml").write_text(f"{text}\n[engines.reward]\nload = {folder[1]}\nengine = {engine}\n")
    words = *WORDS[:-4], "--reward", "judged", "--plugin", "judged.py", *address
    for count in (0, 2):
        ended = prepared.run(*words, "--name", f"with-{count}", "--rollout-workers", str(count))
        assert ended.code == 0, ended.err
    plain, divided = (groups_of(prepared, f"with-{count}") for count in (0, 2))
    assert len({row["reward"] for row in plain[0]}) > 3
    assert plain == divided


def eval_metrics(tiny: TinyRun, run: str) -> list[dict[str, float]]:
    lines = [line["metrics"] for line in tiny.metrics(run) if line["axis"] == "eval/step"]
    return [{name: value for name, value in line.items() if not name.endswith(("time", "seconds"))} for line in lines]


@pytest.mark.faults
def test_a_killed_worker_is_replaced_and_nothing_is_lost(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    address = serve(0.02)
    ended = prepared.run(*WORDS, *address, "--name", "plain")
    assert ended.code == 0, ended.err
    hold = held_at(prepared, 1)
    process = prepared.start("run", "run.toml", *WORDS, *address, "--name", "killed", "--rollout-workers", "2")
    wait_until((prepared.folder / "held").exists, process)
    workers_of(process.pid)[0].kill()
    hold.unlink()
    ended = prepared.end(process)
    assert ended.code == 0, ended.err
    assert groups_of(prepared, "killed") == groups_of(prepared, "plain")
    assert rollout_metric(prepared, "killed", "rollout/rollout_worker_restarts") == 1
    lost = [event for event in events(prepared, "killed") if event["event"] == "sample_failed"]
    assert lost
    assert all("rollout worker" in event["error"] and "died (exit code -9)" in event["error"] for event in lost)
    assert not [event for event in events(prepared, "killed") if event["event"] == "engine_lost"]


@pytest.mark.faults
def test_workers_that_hang_are_replaced_and_nothing_is_lost(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """One by a generator that does not await, in the second step, and another one whose process is stopped, in the third."""
    address = serve(0.01)
    (prepared / "stuck.py").write_text(STUCK)
    words = *WORDS, *address, "--plugin", "stuck.py", "--generate", "stuck"
    hanging = "--rollout-workers", "2", "--rollout-worker-timeout", "2"
    hold = held_at(prepared, 2)
    process = prepared.start("run", "run.toml", *words, "--name", "hanging", *hanging)
    wait_until((prepared.folder / "held").exists, process)
    stopped = workers_of(process.pid)[0]
    stopped.suspend()
    hold.unlink()
    ended = prepared.end(process)
    assert ended.code == 0, ended.err
    assert (prepared.folder / "was-stuck").exists()
    assert not stopped.is_running()
    ended = prepared.run(*words, "--name", "plain")
    assert ended.code == 0, ended.err
    assert groups_of(prepared, "hanging") == groups_of(prepared, "plain")
    lost = [event["error"] for event in events(prepared, "hanging") if event["event"] == "sample_failed"]
    blocked = [error for error in lost if "stuck.py:12 stuck" in error]
    # Its last report may have been that its loop was late.
    silent = [error for error in lost if f"(pid {stopped.pid}) was killed: " in error]
    assert blocked
    assert silent
    assert all("for 2 s (--rollout-worker-timeout)" in error for error in lost)
    assert any("rollout worker 1 (pid" in error for error in blocked)
    held = [event for event in events(prepared, "hanging") if event["event"] == "loop_held"]
    assert any(
        event["where"].startswith("rollout worker 1: ") and "stuck.py:12 stuck" in event["where"] for event in held
    )
    assert rollout_metric(prepared, "hanging", "rollout/rollout_worker_restarts") >= 2


def rollout_metric(tiny: TinyRun, run: str, name: str) -> float:
    """Its sum over all steps."""
    return sum(line["metrics"].get(name, 0.0) for line in tiny.metrics(run) if line["axis"] == "rollout/step")


@pytest.mark.faults
def test_a_killed_run_resumes_and_equals_the_uninterrupted_one(
    prepared: TinyRun, serve: Callable[..., tuple[str, ...]]
):
    address = serve(0.005)
    ended = prepared.run(*WORDS, *address, "--name", "plain")
    assert ended.code == 0, ended.err
    words = "run", "run.toml", *WORDS, *address, "--name", "killed", "--rollout-workers"
    hold = held_at(prepared, 2)
    process = prepared.start(*words, "2")
    wait_until(lambda: steps_of(prepared, "killed") == 2, process)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hold.unlink()
    # Workers end with their driver.
    psutil.wait_procs(workers, timeout=30)
    assert not [worker for worker in workers if worker.is_running()]
    # Another number of workers is the same run.
    ended = prepared.slime(*words, "1")
    assert ended.code == 0, ended.err
    assert groups_of(prepared, "killed") == groups_of(prepared, "plain")


def test_partial_rollouts_in_workers(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """Aborted responses continue with the tokens that they had, no prompt is lost, and none is trained twice."""
    words = (
        "--max-async-level", "2", "--partial-rollout", "--over-sampling-batch-size", "10", "--max-staleness", "6",
        "--rollout-workers", "2", "--num-rollout", "6", "--save-interval", "2",
    )  # fmt: skip
    ended = prepared.run(*WORDS, *serve(0.02), *words)
    assert ended.code == 0, ended.err
    rows = [row for step in groups_of(prepared) for row in step]
    assert set(Counter(row["group_index"] for row in rows).values()) == {2}
    assert {row["status"] for row in rows} <= {"completed", "truncated"}
    counted = Counter[str]()
    for line in prepared.metrics():
        counted.update({name: value for name, value in line["metrics"].items() if name.startswith("rollout/partial")})
    assert counted["rollout/partial_groups"] > 0
    # A continued response has the tokens of one that was never interrupted.
    ended = prepared.run(*WORDS, *serve(), "--name", "plain", "--rollout-batch-size", "20", "--num-rollout", "2")
    assert ended.code == 0, ended.err
    whole = {row["index"]: row["tokens"] for step in groups_of(prepared, "plain") for row in step}
    compared = [row for row in rows if row["index"] in whole]
    assert len(compared) > 30
    assert all(row["tokens"] == whole[row["index"]] for row in compared)


@pytest.mark.faults
def test_a_worker_that_dies_again_and_again_ends_the_run(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    (prepared / "deadly.py").write_text(DEADLY)
    words = "--plugin", "deadly.py", "--generate", "deadly", "--rollout-workers", "2", "--max-retries", "1"
    ended = prepared.run(*WORDS, *serve(), *words)
    assert ended.code == 4
    assert "train.jsonl" in ended.error
    assert "lost 2 times with the rollout worker that had it (--max-retries 1)" in ended.error
    assert "(exit code 7)" in ended.error


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ("--engine", "local"),
            ("rollout.rollout_workers = 2", 'engine "local"', "--rollout-workers 0"),
        ),
        (
            ("--generate", "external_agents", "--generate.token-file", "token", "--engine", "sglang"),
            ("rollout.rollout_workers = 2", 'one generator "external_agents"', "--rollout-workers 0"),
        ),
        (("--engine", "sglang", "--rollout-workers", "-1"), ("rollout.rollout_workers",)),
    ],
)
def test_runs_that_cannot_have_workers(tiny: TinyRun, words: tuple[str, ...], parts: tuple[str, ...]):
    ended = tiny.run("--rollout-workers", "2", *words, "--dry-run")
    assert ended.code == 2
    for part in parts:
        assert part in ended.error


def test_the_error_of_a_generator_that_cannot_open(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    (prepared / "closed.py").write_text(CLOSED)
    words = "--plugin", "closed.py", "--generate", "closed", "--rollout-workers", "1"
    ended = prepared.run(*WORDS, *serve(), *words)
    assert ended.code == 2
    assert "the tool is not there. Start it." in ended.error


def test_the_error_of_a_generator_whose_samples_cannot_be_sent(
    prepared: TinyRun, serve: Callable[..., tuple[str, ...]]
):
    (prepared / "counting.py").write_text(COUNTING)
    words = "--plugin", "counting.py", "--generate", "counting"
    ended = prepared.run(*WORDS, *serve(), *words, "--rollout-workers", "1")
    assert ended.code == 2
    assert 'generator "counting.py/counting", the samples of ' in ended.error
    assert "cannot be sent between a rollout worker and the driver: AttributeError: Can't pickle" in ended.error
    assert "--rollout-workers 0" in ended.error


def test_workers_whose_engines_are_actors(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """There an engine makes its calls itself, and responses pass through the driver."""
    address = serve()
    for words in (("--name", "plain"), ("--name", "actors", "--launcher", "ray", "--rollout-workers", "2")):
        ended = prepared.run(*WORDS, *address, "--num-rollout", "2", *words)
        assert ended.code == 0, ended.err
    assert groups_of(prepared, "actors") == groups_of(prepared, "plain")


@pytest.mark.faults
def test_an_engine_that_fails_is_replaced_under_workers(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    for words in (
        (*serve(), "--name", "plain"),
        # After the requests that the start makes.
        (*serve(0.01, failing=30), "--name", "failing", "--rollout-workers", "2"),
    ):
        ended = prepared.run(*WORDS, *words)
        assert ended.code == 0, ended.err
    kinds = Counter(event["event"] for event in events(prepared, "failing"))
    assert kinds["engine_lost"] == kinds["engine_recovered"] == 1
    assert groups_of(prepared, "failing") == groups_of(prepared, "plain")


def test_a_loop_of_ones_own_has_workers(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """It has the samples of a run without."""
    address = serve()
    command = [sys.executable, "-c", OWN_LOOP, "2", address[1]]
    done = subprocess.run(command, cwd=prepared.folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    ended = prepared.run(*WORDS, *address, "--num-rollout", "1")
    assert ended.code == 0, ended.err
    assert printed == [[row["tokens"], row["reward"]] for row in groups_of(prepared)[0]]
    assert len(printed) == 12
    assert len({reward for _, reward in printed}) == 2


@pytest.mark.faults
def test_ctrl_c_saves_and_ends_the_workers(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """Ctrl-C reaches all processes of the terminal; the driver decides what ends when."""
    address = serve(0.02)
    ended = prepared.run(*WORDS, *address, "--name", "plain")
    assert ended.code == 0, ended.err
    words = "run", "run.toml", *WORDS, *address, "--name", "stopped", "--rollout-workers", "2"
    hold = held_at(prepared, 1)
    process = prepared.start(*words)
    wait_until((prepared.folder / "held").exists, process)
    workers = workers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    ended = prepared.end(process)
    hold.unlink()
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert len(workers) >= 2
    assert not [worker for worker in workers if worker.is_running()]
    ended = prepared.slime(*words)
    assert ended.code == 0, ended.err
    assert groups_of(prepared, "stopped") == groups_of(prepared, "plain")


def test_errors_are_those_of_a_run_without_workers(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    (prepared / "faulty.py").write_text(FAULTY)
    address, found = serve(), []
    for count in (0, 2):
        name = f"with-{count}"
        words = "--plugin", "faulty.py", "--reward", "strict", "--generate", "shaky", "--rollout-workers", str(count)
        ended = prepared.run(*WORDS, *address, *words, "--name", name)
        # In the step before the one that the reward ends: how far that one came is chance.
        failed = Counter(
            (event["group"], event["sample"], event["tries"], event["will_retry"], event["error"])
            for event in events(prepared, name)
            if event["event"] == "sample_failed" and event["group"] < 6
        )
        found.append((ended.code, ended.error, failed, groups_of(prepared, name)))
    assert found[0] == found[1]
    code, error, failed, groups = found[0]
    assert code == 4
    assert len(groups) == 1
    assert "train.jsonl, line" in error
    assert "ValueError: no number" in error
    assert len(failed) >= 3
    assert all("KeyError: 'tool'" in text for *_, text in failed)
