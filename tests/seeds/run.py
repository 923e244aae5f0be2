"""Translates and runs launch scripts of upstream slime, on a small model: python tests/seeds/run.py [NAME ...]

Each script in commands/ has the flags of one of upstream's commands, with small sizes. Engine `local` and backend `fsdp`
are in place of SGLang and Megatron, so it runs on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from slime_plugin_kit.warm_slime import WarmSlime, warm_slime

COMMANDS: Final = Path(__file__).parent / "commands"
ALPHABET: Final = "".join(map(chr, range(32, 127)))
SIZES: Final = ["--hidden-size", "32", "--num-layers", "1", "--intermediate-size", "64", "--max-length", "256"]
TEMPLATE: Final = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IMPORTED: Final = ("slime_core.cli.main", "slime_core.cli.training", "slime_fsdp.backend", "slime_local.engine")
ON_CPU: Final = ["--backend", "fsdp", "--engine", "local"]


@dataclass(frozen=True, slots=True)
class Ran:
    """One command, translated and run."""

    name: str
    notes: str
    """What the translation reports."""
    steps: int
    seconds: float


def names() -> list[str]:
    return sorted(path.stem for path in COMMANDS.glob("*.sh") if path.stem != "models")


def prepare(folder: Path, warm: WarmSlime) -> None:
    """Makes model, teacher and data in `folder`, and copies the commands there."""
    shutil.copytree(COMMANDS, folder, dirs_exist_ok=True)
    for name in ("model", "teacher"):
        slime(warm, folder, "models", "new", name, "--alphabet", ALPHABET, *SIZES)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    sums = [(a, b) for a in range(4) for b in range(4)]
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}=?"}], "label": str(a + b)} for a, b in sums]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    choices = [
        {"prompt": [{"role": "user", "content": "2+2? A: 3, B: 4"}], "label": "B", "metadata": {"choices": ["3", "4"]}}
    ] * 2
    asked = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    instructions = [{"prompt": [{"role": "user", "content": "No commas."}], "label": "", "metadata": asked}]
    for name, table in (("choices", choices), ("instructions", instructions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    chats = [{"messages": [*row["prompt"], {"role": "assistant", "content": row["label"]}]} for row in rows[:8]]
    pq.write_table(pa.Table.from_pylist(chats), folder / "messages.parquet")


def slime(warm: WarmSlime, folder: Path, *words: str) -> tuple[str, str]:
    """What the command prints: its output, its notes. SystemExit if it fails."""
    code, out, err = warm.run(words, folder)
    if code:
        raise SystemExit(f"slime {' '.join(words)}: exit code {code}\n{out[-2000:]}\n{err}")
    return out, err


def run(folder: Path, name: str, warm: WarmSlime) -> Ran:
    """Translates a command in the prepared `folder` and runs it. SystemExit if one of the two fails."""
    begun = time.monotonic()
    translated, notes = slime(warm, folder, "compat", *ON_CPU, f"{name}.sh")
    (folder / f"{name}.toml").write_text(translated)
    slime(warm, folder, "run", f"{name}.toml", "--name", name)
    records = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    steps = sum(record["axis"] == "rollout/step" for record in records)
    return Ran(name, notes, steps, time.monotonic() - begun)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names())}; by default all")
    chosen = parser.parse_args(words).names or names()
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as printed:
        run_all(Path(made), Path(printed), chosen)


def run_all(folder: Path, printed: Path, chosen: Sequence[str]) -> None:
    """`printed`: for what the commands print."""
    with warm_slime(printed, IMPORTED) as warm:
        prepare(folder, warm)
        for name in chosen:
            ran = run(folder, name, warm)
            print(
                f"{ran.name:<24} {ran.steps} steps, {ran.notes.count(chr(10))} notes, {ran.seconds:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
