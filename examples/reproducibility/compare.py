"""Runs run.toml twice, from scratch, and compares bitwise: trained weights, responses of every step, metrics.

python examples/reproducibility/compare.py [flags of slime run for the second run]
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN_FILE = Path(__file__).with_name("run.toml")
CLOCK = ("perf/", "buffer/")
"""Metrics that depend on time."""


def run(runs_dir: Path, *flags: str) -> Path:
    slime = Path(sys.executable).with_name("slime")
    subprocess.run([slime, "run", RUN_FILE, "--runs-dir", runs_dir, "--dump-rollouts", *flags], check=True)
    (folder,) = runs_dir.iterdir()
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line["metrics"].items() if not name.startswith(CLOCK)} for line in lines]


def files(folder: Path) -> dict[str, str]:
    """Hashes of weights and responses."""
    paths = [*folder.glob("hf/*.safetensors"), *folder.glob("rollouts/*.parquet")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        one, other = run(Path(work, "one")), run(Path(work, "other"), *sys.argv[1:])
        first, second = files(one), files(other)
        different = [name for name in sorted(first | second) if first.get(name) != second.get(name)]
        for name in sorted(first):
            print(f"{name:30} {first[name][:16]} {'differs' if name in different else 'the same'}")
        same_metrics = metrics(one) == metrics(other)
        print(f"{'metrics but times':30} {'the same' if same_metrics else 'differ'}")
    sys.exit(1 if different or not same_metrics else 0)


if __name__ == "__main__":
    main()
