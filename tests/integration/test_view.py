"""`slime view`: its output for dumps that are written here, and its errors on input that it cannot use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest

from slime_core.data.model_folder import load_tokenizer
from slime_core.data.table import dump_file, write_groups
from slime_core.types.sample import Status, VersionSpan
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_sources.replay_example import example_group, write_example

if TYPE_CHECKING:
    from collections.abc import Callable

    from slime_plugin_kit.warm_slime import WarmSlime

    View: TypeAlias = Callable[..., tuple[int, str, str]]
    """Exit code, standard output, standard error."""


@pytest.fixture
def view(warm: WarmSlime, run: Path) -> View:
    return lambda *words: warm.run(["view", *map(str, words)], run)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two groups of three responses, numbered from 0; the last group's is a conversation with a tool."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rollouts").mkdir()
    write_example(folder / "rollouts", num_steps=3, num_groups=2, num_samples=3)
    model = make_tiny_model(folder / "model")
    manifest = {"config": {"model": {"hf_checkpoint": str(model)}}, "trust_remote_code": False}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    easy, hard = (example_group(number, 3) for number in (4, 5))
    easy = replace(
        easy, samples=tuple(replace(sample, reward=2.0, reward_parts={"form": 0.25}) for sample in easy.samples)
    )
    talk = replace(
        hard.samples[0],
        tokens=np.concatenate([hard.prompt.token_ids, np.array([5, 6, 7, 8, 9, 10], np.int32)]),
        loss_mask=np.array([1, 1, 0, 0, 1, 1], np.uint8),
        rollout_log_probs=np.array([-1, -2, 0, 0, -3, -5], np.float32),
        spans=(VersionSpan(1, 0, 2), VersionSpan(2, 4, 6)),
        status=Status.TRUNCATED,
        counts={"turns": 2.0},
    )
    hard = replace(hard, samples=(talk, *hard.samples[1:]))
    write_groups(dump_file(folder / "rollouts", 2), [easy, hard])
    return folder


def rows(out: str) -> list[str]:
    """First words of the lines of a table of groups."""
    return [line.split()[0] for line in out.splitlines() if line.split() and line.split()[0].isdigit()]


def test_the_last_step(run: Path, view: View) -> None:
    code, out, _ = view(run)
    assert code == 0
    summary, head, easy, hard = out.splitlines()
    assert summary.endswith("2 groups, 6 responses, reward 1.500, 3 tokens on average, 1 truncated")
    assert head.split() == [
        "group",
        "prompt",
        "answers",
        "reward",
        "lowest",
        "highest",
        "tokens",
        "longest",
        "cut",
        "version",
    ]
    assert easy.split() == ["4", "4=", "3", "2.000", "2", "2", "2", "3", "0"]
    assert hard.split() == ["5", "5=", "3", "1.000", "0", "2", "4", "6", "1", "0", "to", "2"]


@pytest.mark.parametrize(
    ("order", "first"), [("drawn", "4"), ("worst", "5"), ("best", "4"), ("spread", "5"), ("longest", "5")]
)
def test_the_order_of_groups(run: Path, view: View, order: str, first: str) -> None:
    _, out, _ = view(run, "--sort", order, "--limit", 1)
    assert rows(out)[0] == first
    assert out.splitlines()[-1] == "1 of 2 groups; --limit 2 shows all."


def test_a_group_is_found_in_any_step(run: Path, view: View) -> None:
    code, out, _ = view(run / "rollouts", "--group", 1)
    assert code == 0
    assert out.startswith("group 1, 2 tokens, a.jsonl:1\n1=\n")
    assert "sample 5: reward 2, 3 tokens, 3 trained, completed\nxxx\n" in out
    _, out, _ = view(run, "--group", 4)
    assert "reward 2 (form 0.25)" in out


def test_a_response_part_by_part(run: Path, view: View) -> None:
    code, out, _ = view(run, "--sample", 15)
    assert code == 0
    assert "sample 15: reward 0, 6 tokens, 4 trained, truncated, turns 2" in out
    tokenizer = load_tokenizer(run / "model", trust_remote_code=False)
    first, tool, second = (tokenizer.decode(tokens) for tokens in ([5, 6], [7, 8], [9, 10]))
    assert [line.split() for line in out.splitlines()[-3:]] == [
        ["0", "to", "2", "version", "1", "yes", "-1.500", *first.split()],
        ["2", "to", "4", "-", *tool.split()],
        ["4", "to", "6", "version", "2", "yes", "-4.000", *second.split()],
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", 3], "step 3 is not there; there are 3, 0 to 2."),
        (["--group", 9], "no group 9 in steps 0 to 2; there are 0 to 5."),
        (["--step", 1, "--sample", 17], "no sample 17 in step 1; there are 6 to 11."),
        (["--group", 1, "--sample", 2], "--group and --sample: pass only one of them."),
        (["--sort", "luck"], "'luck' is not one of 'drawn', 'worst'"),
        (["--sample", 1, "--hf-checkpoint", "nowhere"], "nowhere: no tokenizer in it"),
    ],
)
def test_missing_groups_and_samples_are_reported(run: Path, view: View, words: list[object], expected: str) -> None:
    code, out, error = view(run, *words)
    assert (code != 0, out) == (True, "")
    assert expected in error


def test_a_folder_without_dumps(run: Path, view: View, tmp_path: Path) -> None:
    code, _, error = view(tmp_path)
    assert code != 0
    assert "no dumped rollouts there (step_*.parquet). A run writes them with --dump-rollouts." in error
    _, _, error = view(run / "rollouts", "--sample", 1)
    assert "its tokenizer is not known: --hf-checkpoint FOLDER" in error
    cut = tmp_path / "rollouts"
    cut.mkdir()
    (cut / "step_000000.parquet").write_bytes((run / "rollouts" / "step_000000.parquet").read_bytes()[:100])
    _, _, error = view(tmp_path)
    assert "cannot be read as Parquet" in error
