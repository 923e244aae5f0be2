"""A configuration of verl and a script of TRL, translated and run with their own reward functions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_plugin_kit.warm_slime import WarmSlime

PEERS = Path(__file__).parents[2] / "plugins" / "slime-compat" / "tests" / "peers"
SUMS = [(a, b) for a in range(5) for b in range(4)]


@pytest.fixture
def tiny_peer(make_tiny: Callable, warm: WarmSlime, tmp_path: Path):
    """`tiny_peer(words)` translates there; its model has a chat template."""
    tiny = make_tiny(tmp_path / "there")
    tiny.warm = warm
    shutil.copytree(PEERS, tiny.folder, dirs_exist_ok=True)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tiny / "base" / "chat_template.jinja").write_text(template)

    def translate(*words: str):
        translated = tiny.slime("compat", *words)
        assert translated.code == 0, translated.err
        (tiny / "run.toml").write_text(translated.out)
        planned = tiny.run("--dry-run")
        assert planned.code == 0, planned.err
        ended = tiny.run()
        assert ended.code == 0, ended.err
        return tiny

    translate.folder = tiny.folder
    return translate


def messages(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}="}]


@pytest.mark.runs
def test_a_script_of_verl_is_trained_with_its_own_reward_function(tiny_peer) -> None:
    rows = [
        {"data_source": "sums", "prompt": messages(a, b), "reward_model": {"ground_truth": str(a + b)}} for a, b in SUMS
    ]
    pq.write_table(pa.Table.from_pylist(rows), tiny_peer.folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:4]), tiny_peer.folder / "test.parquet")
    tiny = tiny_peer("verl", "--engine", "local", "verl.sh")
    steps = [record["metrics"] for record in tiny.metrics("tiny_sums") if record["axis"] == "rollout/step"]
    assert len(steps) == 2
    # Means over 16 responses that get 0.5 or 1.5.
    assert all(0.5 <= step["rollout/raw_reward"] <= 1.5 for step in steps)
    assert all((16 * step["rollout/raw_reward"]).is_integer() for step in steps)


@pytest.mark.runs
def test_a_script_of_trl_is_trained_with_its_own_reward_functions(tiny_peer) -> None:
    rows = [{"prompt": messages(a, b), "solution": str(a + b)} for a, b in SUMS]
    (tiny_peer.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = tiny_peer("trl", "--engine", "local", "--num-processes", "1", "trl_train.py")
    metrics = tiny.folder / "out" / "sums" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["axis"] == "rollout/step"]
    assert len(steps) == 2
    # Means over 16 responses of 0 or 1, and half of 0 or 0.5.
    assert all((64 * step["rollout/raw_reward"]).is_integer() for step in steps)
