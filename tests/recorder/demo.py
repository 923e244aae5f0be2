"""The first ten steps of the demo: what was printed, metrics, files, and checksums of the weights."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from checkout import Checkout

# The learning rate falls over the demo's 60 steps of 4 optimizer steps: what is trained are its first ten.
WORDS: Final = (
    "slime", "run", "examples/arithmetic/run.toml", "--num-rollout", "10", "--lr-decay-iters", "240", "--dump-rollouts",
)  # fmt: skip
TIMED: Final = "perf/"
"""Prefixes of metrics that differ from run to run."""
NOT_KEPT: Final = frozenset({"seconds", "blocked_seconds", "time"})
"""Keys of JSON files."""


def record(checkout: Checkout, out: Path) -> None:
    """Makes the demo's model and data, trains, and records the results."""
    out.mkdir(parents=True)
    ended = checkout.run(*WORDS)
    # Which steps are printed depends on how many there are, not on time.
    (out / "printed.txt").write_text(ended.text())
    if ended.code != 0:
        return
    run, generated = checkout.work / "runs/arithmetic", checkout.work / "examples/arithmetic/generated"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.txt").write_text("".join(metrics(lines)))
    (out / "files.txt").write_text(checkout.plain("".join(sorted(files(run)))))
    (out / "weights.txt").write_text("".join([*weights(generated / "base"), *weights(run)]))
    (out / "data.txt").write_text("".join(checksum(path, generated) for path in sorted(generated.glob("*.jsonl"))))
    for name in ("manifest.json", "summary.json"):
        content = without_times(json.loads((run / name).read_text()))
        (out / name).write_text(checkout.plain(json.dumps(content, indent=1, sort_keys=True)) + "\n")
    (out / "config.toml").write_text(checkout.plain((run / "config.toml").read_text()))
    events = (json.dumps(without_times(json.loads(line))) for line in (run / "events.jsonl").read_text().splitlines())
    (out / "events.jsonl").write_text(checkout.plain("".join(f"{event}\n" for event in events)))


def metrics(lines: list[str]) -> Iterator[str]:
    """A metric a line; those of time by name alone."""
    for line in lines:
        logged = json.loads(line)
        for name, value in sorted(logged["metrics"].items()):
            given = "<timed>" if name.startswith(TIMED) else repr(value)
            yield f"{logged['axis']} {logged['step']} {name} {given}\n"


def files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        yield f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}\n"


def weights(folder: Path) -> Iterator[str]:
    """Checksums of every tensor, and of files that users load; a checkpoint's file has its tensors in any order."""
    for path in sorted(folder.rglob("*.safetensors")):
        # Random states that are not seeded differ from process to process.
        if path.name.startswith("rng_"):
            continue
        yield f"{folder.name}/{path.relative_to(folder)}\n" if "state" in path.parts else checksum(path, folder)
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        data = content[8 + length :]
        for name, entry in sorted(header.items()):
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield f"  {name} {entry['dtype']} {entry['shape']} {hashlib.sha256(data[start:end]).hexdigest()}\n"


def checksum(path: Path, folder: Path) -> str:
    return f"{folder.name}/{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in NOT_KEPT}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value
