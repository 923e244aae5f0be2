"""A working folder for the cookbook's recipes: what they load by name lies in it, so that nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from chat_model import make_chat_model

MODEL: Final = "Qwen/Qwen3-8B"
"""The cookbook chooses its renderer by this name."""
CONFIGS: Final = """\
---
configs:
- config_name: {name}
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""
WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight")


def make_cookbook_folder(folder: Path) -> Path:
    make_chat_model(folder / MODEL)
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"Twice {word}."},
                {"role": "assistant", "content": f"{word} {word}"},
            ]
        }
        for word in WORDS
    ]
    dataset(folder / "HuggingFaceH4/no_robots", "default", talks * 8)
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(64)]
    dataset(folder / "openai/gsm8k", "main", sums)
    return folder


def dataset(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CONFIGS.format(name=name))
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
