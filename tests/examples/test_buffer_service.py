"""An agent outside the run, over HTTP: it takes prompts, asks the run's engines, and pushes trajectories."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime_core.data.table import read_groups
from slime_models.new_model import ModelSizes, new_model

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
RUN = """\
name = "outside"
backend = "fsdp"
engine = "local"
reward = "gsm8k"
algo = "grpo"
generate = { name = "external_agents", port = PORT, token_file = "agents.token", give_labels = true }
[model]
hf_checkpoint = "base"
[data]
prompt_data = "train.jsonl"
input_key = "prompt"
label_key = "label"
[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 4
max_async_level = 2
max_staleness = 4
dump_rollouts = true
[train]
num_rollout = 4
[checkpoint]
save_hf = false
save_interval = 1
"""


def number_of(ticket: str) -> int:
    return int(ticket.rpartition("-")[2])


class Agent(threading.Thread):
    """Generates responses to the samples that it gets. `holds`: tickets that it keeps for later."""

    def __init__(self, url: str, token_file: Path) -> None:
        super().__init__(daemon=True)
        self.url, self.token_file = url, token_file
        self.held: dict[str, dict[str, Any]] = {}
        self.given: list[str] = []
        self.pushed: list[str] = []
        self.refused: list[dict[str, Any]] = []
        self.holds: Callable[[str], bool] = lambda ticket: False
        self.ended = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, trust_env=False, timeout=20) as client:
            while not self.ended.is_set():
                try:
                    self.serve(client)
                except httpx.HTTPError:
                    time.sleep(0.05)

    def serve(self, client: httpx.Client) -> None:
        client.get("/health")
        client.headers["authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        response = client.post("/get_samples", json={"num_samples": 16, "wait_s": 0.2}).raise_for_status()
        for given in response.json()["samples"]:
            self.given.append(given["ticket"])
            self.held[given["ticket"]] = given
        # In order: samples of older policies must be trained before they are too old.
        for ticket, given in sorted(self.held.items(), key=lambda held: number_of(held[0])):
            if not self.holds(ticket):
                del self.held[ticket]
                self.respond(client, given)

    def respond(self, client: httpx.Client, given: dict[str, Any]) -> None:
        asked = {"ticket": given["ticket"], "token_ids": given["prompt_token_ids"] + given["kept_token_ids"]}
        generated = client.post("/generate", json=asked)
        if generated.status_code != 200 or generated.json()["finish_reason"] == "abort":
            return
        pushed = {key: generated.json()[key] for key in ("token_ids", "log_probs", "spans")}
        pushed |= {"ticket": given["ticket"], "reward": float(len(pushed["token_ids"]) % 2)}
        answer = client.post("/add_samples", json={"samples": [pushed]})
        if answer.status_code == 200:
            self.pushed.append(given["ticket"])
        elif answer.status_code < 500 and answer.json()["results"][0]["code"] != "ticket_ended":
            self.refused.append(answer.json())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = ModelSizes(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_length=64)
    new_model(tmp_path / "base", "qwen3", sizes, alphabet="0123456789+= ", seed=1, initializer_range=0.3)
    rows = [{"prompt": f"{n}+{n}=", "label": f"#### {2 * n}"} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "run.toml").write_text(RUN.replace("PORT", str(free.getsockname()[1])))
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*SLIME, "run", "run.toml"], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def agent_of(folder: Path) -> Agent:
    port = (folder / "run.toml").read_text().partition("port = ")[2].partition(",")[0]
    return Agent(f"http://127.0.0.1:{port}", folder / "agents.token")


def test_what_was_pushed_before_a_checkpoint_is_not_asked_for_again(folder: Path) -> None:
    """Two groups of the steps to come are half answered when the first step is saved; then the run is stopped. Nothing is too
    old for training here: that would be a reason to ask again."""
    agent, early = agent_of(folder), {"train-4", "train-6"}

    def holds(ticket: str) -> bool:
        return ticket not in early and (number_of(ticket) >= 4 or not early <= set(agent.pushed))

    agent.holds = holds
    run = start(folder)
    agent.start()
    deadline = time.monotonic() + 240
    checkpoints = folder / "runs" / "outside" / "checkpoints"
    while not list(checkpoints.glob("*/COMPLETE")) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=240)
    before, given = list(agent.pushed), len(agent.given)
    assert {"train-0", "train-1", "train-2", "train-3"} | early == set(before), out + err
    agent.holds = lambda ticket: False
    run = start(folder)
    out, err = run.communicate(timeout=240)
    agent.ended.set()
    assert run.returncode == 0, out + err
    assert not set(before) & set(agent.given[given:]), "an answer was asked for again"
    assert "train-5" in agent.given[given:]
    trained = [
        sample
        for path in sorted((folder / "runs" / "outside" / "rollouts").glob("*.parquet"))
        for group in read_groups(path)
        for sample in group.samples
    ]
    assert len(trained) == len({sample.index for sample in trained}) == 16
    assert {f"train-{sample.index}" for sample in trained} <= set(agent.pushed)
    assert {sample.reward for sample in trained} <= {0.0, 1.0}
    assert {sample.spans[0].version for sample in trained} > {0}
    assert not agent.refused
