"""How long `slime view` takes to search, sort and open among many samples, and how much memory its server needs.

    python benchmarks/viewer.py --samples 1000000 --folder /tmp/many

It writes a run folder with as many samples of 1 kB (once; the folder is used again), starts `slime view` on it, and asks as the
page does: first without an index (cold), then, with a new server, with the one that the first left (warm).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import numpy as np

from slime_core.data.table import dump_file, dumped_steps, write_groups
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan

RUN: Final = "many"
GROUPS: Final = 128
SAMPLES: Final = 8
WORDS: Final = 170
"""About 1 kB."""
TOKENS: Final = 250
VOCABULARY: Final = 50_000
RARE: Final = "quixotically"
"""In one response of ten thousand."""


def vocabulary(random: np.random.Generator, size: int = 20_000) -> list[str]:
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    weights = 1.0 / np.arange(2, 28)
    lengths = random.integers(1, 11, size)
    drawn = random.choice(letters, int(lengths.sum()), p=weights / weights.sum())
    ends = np.cumsum(lengths)
    return ["".join(drawn[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def write_run(folder: Path, num_samples: int) -> None:
    """Steps of 128 groups of 8. What is there already is left."""
    random = np.random.default_rng(0)
    words = vocabulary(random)
    weights = 1.0 / np.arange(5, len(words) + 5)
    weights /= weights.sum()
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    num_steps = -(-num_samples // (GROUPS * SAMPLES))
    there = set(dumped_steps(rollouts))
    for step in range(num_steps):
        if step not in there:
            write_groups(dump_file(rollouts, step), groups_of(step, words, weights))
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(num_steps):
            metrics = {"rollout/raw_reward": step / num_steps, "perf/step_time": 30.0, "perf/train_tokens": 3e5}
            line = {"axis": "rollout/step", "step": step, "rollout_id": step, "attempt": 1, "metrics": metrics}
            file.write(json.dumps(line) + "\n")
    manifest = {"config": {"name": "many", "train": {"num_rollout": num_steps}}, "plugins": {}, "libraries": {}}
    manifest |= {"trust_remote_code": False, "data": "", "fingerprint": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def groups_of(step: int, words: list[str], weights: np.ndarray) -> list[SampleGroup]:
    random = np.random.default_rng(step)
    drawn = random.choice(len(words), (GROUPS * SAMPLES, WORDS), p=weights)
    tokens = random.integers(0, VOCABULARY, (GROUPS * SAMPLES, TOKENS)).astype(np.int32)
    log_probs = -random.exponential(0.5, (GROUPS * SAMPLES, TOKENS)).astype(np.float32)
    rewards = random.random(GROUPS * SAMPLES).round(3)
    groups = []
    for group in range(GROUPS):
        number = step * GROUPS + group
        prompt = Prompt(
            group_index=number,
            text=f"Question {number}: " + " ".join(words[word] for word in drawn[group * SAMPLES, :12]),
            token_ids=np.arange(16, dtype=np.int32),
            label=str(number),
            origin=f"questions.jsonl:{number}",
        )
        samples = []
        for row in range(group * SAMPLES, (group + 1) * SAMPLES):
            index = step * GROUPS * SAMPLES + row
            text = [words[word] for word in drawn[row]]
            if index % 10_000 == 77:
                text[90] = RARE
            samples.append(
                Sample(
                    index=index,
                    group_index=number,
                    rollout_id=index,
                    prompt=prompt,
                    tokens=np.concatenate([prompt.token_ids, tokens[row]]),
                    prompt_length=16,
                    loss_mask=np.ones(TOKENS, np.uint8),
                    rollout_log_probs=log_probs[row],
                    response=" ".join(text),
                    spans=(VersionSpan(step, 0, TOKENS),),
                    status=Status.TRUNCATED if rewards[row] < 0.05 else Status.COMPLETED,
                    reward=float(rewards[row]),
                    reward_parts={"format": float(rewards[row] > 0.5)},
                )
            )
        groups.append(SampleGroup(prompt=prompt, samples=tuple(samples)))
    return groups


ASKED: Final = {
    "the list of runs": "/api/runs",
    "steps": f"/api/runs/{RUN}/steps",
    "groups of a step by spread": f"/api/runs/{RUN}/groups?step=77&sort=spread&descending=1",
    "samples by reward": f"/api/runs/{RUN}/samples?sort=reward",
    "the last page by tokens": f"/api/runs/{RUN}/samples?sort=tokens&descending=1&offset=100000",
    "filter": f"/api/runs/{RUN}/samples?sort=reward&where=reward%3C0.5%20part:format=0%20status=truncated",
    "search: a rare word": f"/api/runs/{RUN}/samples?sort=reward&q={RARE}",
    "search: no such word": f"/api/runs/{RUN}/samples?q=zzzzz",
    "search: a frequent word": f"/api/runs/{RUN}/samples?sort=reward&q=the",
    "search: two words": f"/api/runs/{RUN}/samples?sort=reward&q=tie%20en",
    "search: a phrase": f"/api/runs/{RUN}/samples?q=%22tie%20en%22",
    "search: one letter": f"/api/runs/{RUN}/samples?sort=reward&q=x",
    "open a sample": f"/api/runs/{RUN}/sample?index=500123",
}
"""What is asked, and its address."""


class Server:
    """`slime view` of the folder."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-c", "from slime_core.cli.main import main; main()", "view", str(folder), "--page"]
        self._began = time.perf_counter()
        self.process = subprocess.Popen([*words, "--no-browser"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._address, _, self._token = self.process.stdout.readline().strip().partition("/#token=")
        self.ready_s = time.perf_counter() - self._began

    def ask(self, path: str) -> tuple[float, dict[str, Any]]:
        """Seconds, and the reply."""
        request = urllib.request.Request(self._address + path, headers={"Authorization": f"Bearer {self._token}"})
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as reply:
            content = reply.read()
        return time.perf_counter() - began, json.loads(content)

    def indexed(self) -> float:
        """Seconds since its start until everything is indexed."""
        while True:
            _, reply = self.ask(f"/api/runs/{RUN}/samples?limit=1")
            if reply["indexed"] == reply["rows"] > 0:
                return time.perf_counter() - self._began
            time.sleep(0.25)

    def most_memory(self) -> float:
        """The most memory that the process has had, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1000

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    server = Server(folder)
    try:
        first = {name: round(server.ask(ASKED[name])[0], 3) for name in ("the list of runs", "steps", "open a sample")}
        indexed_s = server.indexed()
        times: dict[str, list[float]] = {
            name: sorted(server.ask(path)[0] for _ in range(repeats)) for name, path in ASKED.items()
        }
        return {
            "server ready (s)": round(server.ready_s, 2),
            "first replies, while it indexes (s)": first,
            "indexed after (s)": round(indexed_s, 1),
            "median and most (s)": {
                name: [round(values[len(values) // 2], 3), round(values[-1], 3)] for name, values in times.items()
            },
            "most memory (MB)": round(server.most_memory()),
        }
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="Made if it is not there.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-only", action="store_true", help="With the index that is there.")
    asked = parser.parse_args()
    folder = asked.folder / RUN
    write_run(folder, asked.samples)
    if not asked.warm_only:
        shutil.rmtree(folder / "view", ignore_errors=True)
        print(json.dumps({"cold": measure(folder, 1)}, indent=1), flush=True)
    print(json.dumps({"warm": measure(folder, asked.repeats)}, indent=1))


if __name__ == "__main__":
    main()
