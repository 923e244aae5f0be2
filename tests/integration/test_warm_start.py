"""The builder that all examples share: examples/warm_start.py."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_models.new_model import END, ModelSizes, character_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def warm_start() -> ModuleType:
    spec = importlib.util.spec_from_file_location("warm_start", ROOT / "examples/warm_start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Look:
    """Ask for a letter's number with `?`, read the tool's response, and repeat it."""

    alphabet = "abcdef0123456789?="
    tokens = ("<tool>",)
    chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    sizes = ModelSizes(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, max_length=32)
    enough = 0.04
    lr = 1e-2
    max_steps = 300

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rows = [{"prompt": f"{a}{b}=", "label": b} for a in "abcdef" for b in "abcdef"]
        return rows[:-6], rows[-6:]

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        draws = np.random.default_rng(seed).integers(10, size=len(rows))
        return [
            [(row["prompt"], False), ("?", True), (f"<tool>{draw}", False), (row["label"], True)]
            for row, draw in zip(rows, draws, strict=True)
        ]


def test_only_the_models_tokens_are_trained(warm_start: ModuleType) -> None:
    tokenizer = character_tokenizer(Look.alphabet, Look.tokens)
    worked = [("ab=", False), (f"?{END}", True), ("<tool>7", False), ("b", True)]
    prompt, response, mask = warm_start.encoded(worked, tokenizer)
    assert [tokenizer.decode([token]) for token in prompt] == ["a", "b", "="]
    assert [tokenizer.decode([token]) for token in response] == ["?", END, "<tool>", "7", "b", END]
    assert mask == [1, 1, 0, 0, 1, 1]

    uneven = [worked, [("a=", False), ("?", True), ("<tool>", False)]]
    batch, columns = next(warm_start.batches(uneven, tokenizer, seed=0))
    assert set(batch.num_trainable) == {4, 1}
    np.testing.assert_allclose(
        columns.loss_weight, np.where(batch.mask == 1, 1 / batch.num_trainable.sum(), 0), rtol=1e-6
    )
    certain = np.where(batch.mask == 1, 0.0, -5.0).astype(np.float32)
    assert warm_start.exact_chance(batch, certain) == 1.0


def test_a_task_becomes_a_model_and_its_data(
    warm_start: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_start.make(Look(), tmp_path, seed=3, teacher=0.2)
    train, test = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    )
    assert (len(train), len(test)) == (30, 6)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    # A conversation with a tool is no pair of prompt and response.
    assert not (tmp_path / "worked.jsonl").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab="}], tokenize=False) == "ab="
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("random", "base", "teacher")]
    chances = [model(**tokenizer("ab=", return_tensors="pt")).logits[0, -1].softmax(-1) for model in models]
    asks = tokenizer.convert_tokens_to_ids("?")
    assert chances[0][asks] < 0.2
    assert chances[1][asks] > 0.5
    assert chances[2][asks] > chances[1][asks]
    assert "exactly right with probability" in capsys.readouterr().out


class Repeats(Look):
    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        train, held_out = super().rows(seed)
        return train, [*held_out, train[4]]


class Hopeless(Look):
    enough = 0.9
    max_steps = 3


@pytest.mark.parametrize(
    ("task", "expected"),
    [(Repeats(), "1 held-out prompts are training prompts too, such as 'ae='"), (Hopeless(), "0.9 is required")],
)
def test_an_impossible_task_is_refused(warm_start: ModuleType, tmp_path: Path, task: Look, expected: str) -> None:
    with pytest.raises(SystemExit, match=expected):
        warm_start.make(task, tmp_path, seed=3)
    assert not (tmp_path / "base").exists()


def test_a_file_without_a_task(warm_start: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("class TASK:\n    alphabet = 'ab'\n    rows = None\n")
    with pytest.raises(SystemExit, match="lacks tokens, chat_template, sizes, enough, lr, max_steps, worked"):
        warm_start.load_task(file)
    with pytest.raises(SystemExit, match="no such Python file"):
        warm_start.load_task(tmp_path / "none.py")
