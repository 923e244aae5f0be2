"""How long a run waits for its checkpoints, written at once and beside its steps (`--async-save`).

    python benchmarks/async_save.py
    python benchmarks/async_save.py --hidden-size 1024 --num-layers 28 --backend megatron -- --device cuda

Two `slime run` of a random model on two-digit sums, a checkpoint after each of --steps steps; in turn, twice. Words after `--`
go to both. Prints one JSON line for each: seconds of a save, those of them that the run waited for, and seconds of a step,
which share the processor with what is being written (medians without the first, which takes the host memory).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
REWARD = """from slime_core.plugin import reward


@reward("parity")
def parity(sample):
    return float(sample.index % 2)
"""

RUN = """engine = "local"
algo = "grpo"
plugin = ["reward.py"]
reward = "parity"
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 4, n_samples_per_prompt = 8, rollout_max_response_len = 32 }
checkpoint = { save_interval = 1, save_hf = false }
"""


def prepare(folder: Path, asked: argparse.Namespace) -> None:
    sizes = ["--hidden-size", asked.hidden_size, "--num-layers", asked.num_layers, "--num-heads", 8]
    words = [
        "models",
        "new",
        "base",
        "--alphabet",
        "0123456789+= ",
        *sizes,
        "--intermediate-size",
        4 * asked.hidden_size,
    ]
    subprocess.run([*SLIME, *map(str, words)], cwd=folder, check=True, capture_output=True)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10, 30) for b in range(10, 30)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text(RUN)


def measure(folder: Path, asked: argparse.Namespace, number: int, *, aside: bool) -> dict[str, object]:
    name = f"{'aside' if aside else 'waits'}-{number}"
    words = ["--name", name, "--backend", asked.backend, "--num-rollout", str(asked.steps)]
    words += [*(["--async-save"] if aside else []), *asked.more]
    ended = subprocess.run([*SLIME, "run", "run.toml", *words], cwd=folder, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(ended.stderr)
    run = folder / "runs" / name
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "checkpoint_saved"][1:]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [record["metrics"] for record in records if "perf/step_time" in record["metrics"]][1:]
    # Without the save before it, whose blocked seconds are listed.
    steps = [metrics["perf/step_time"] - metrics.get("perf/save_time", 0.0) for metrics in kept]
    newest = max(run.glob("checkpoints/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return {
        "async_save": aside,
        "backend": asked.backend,
        "checkpoint_mib": round(sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 2**20),
        "save_s": round(statistics.median(event["seconds"] for event in saves), 3),
        "blocked_s": round(statistics.median(event["blocked_seconds"] for event in saves), 3),
        "step_s": round(statistics.median(steps), 3),
        "run_s": round(sum(steps) + sum(event["blocked_seconds"] for event in saves), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--backend", default="fsdp")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("more", nargs="*", help="more words for slime run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        prepare(folder, asked)
        for number in range(2):
            for aside in (False, True):
                print(json.dumps(measure(folder, asked, number, aside=aside)), flush=True)


if __name__ == "__main__":
    main()
