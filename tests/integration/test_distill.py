"""Whole runs of supervised fine-tuning and on-policy distillation, against transformers, and their errors on bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_core.data.table import read_groups

if TYPE_CHECKING:
    from conftest import TinyRun
    from slime_plugin_kit.warm_slime import WarmSlime

pytestmark = [pytest.mark.runs, pytest.mark.usefixtures("tiny_forks")]

CONFIG, MODEL, DATA = 2, 3, 3
RESPONSES = ["0", "12", "3+4", "", "55555", "1 1", "7", "90"]
STEPS = 4
SFT = (
    "--algo", "sft", "--n-samples-per-prompt", "1", "--rollout-batch-size", "4", "--num-steps-per-rollout", "2",
    "--num-rollout", str(STEPS), "--lr", "2e-2", "--rollout-max-response-len", "8", "--keep-checkpoints", "9", "--save-hf",
)  # fmt: skip
OPD = ("--algo", "opd", "--n-samples-per-prompt", "1", "--rollout-batch-size", "24", "--lr", "5e-3")


@pytest.fixture(scope="module")
def finished(
    make_tiny: Callable[[Path], TinyRun], warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory
) -> TinyRun:
    """A run of sft to its end, with no reward in the run file; its model is the teacher of the others."""
    tiny = make_tiny(tmp_path_factory.mktemp("distill"))
    tiny.warm = warm
    without_reward(tiny)
    rows = [{"prompt": f"{n}+=", "label": response} for n, response in enumerate(RESPONSES)]
    (tiny / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = tiny.run(*SFT, "--prompt-data", str(tiny / "worked.jsonl"))
    assert ended.code == 0, ended.err
    return tiny


def without_reward(tiny: TinyRun) -> None:
    text = (tiny / "run.toml").read_text()
    (tiny / "run.toml").write_text(text.replace('reward = "gsm8k"\n', ""))


def log_probs(folder: Path, token_ids: Sequence[int], num_response: int) -> np.ndarray[Any, Any]:
    """(num_response,) of the last tokens, by transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
    chosen = rows.gather(1, ids[0, 1:, None])[:, 0]
    return chosen[len(chosen) - num_response :].numpy()


def of_axis(tiny: TinyRun, axis: str, run: str = "tiny") -> list[dict[str, Any]]:
    return [record["metrics"] for record in tiny.metrics(run) if record["axis"] == axis]


def worked(folder: Path) -> Iterator[tuple[list[int], int]]:
    """Tokens of each row with its response and the end, and how many of them are the response's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, text in enumerate(RESPONSES):
        response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        yield [*tokenizer.encode(f"{number}+=", add_special_tokens=False), *response], len(response)


def test_sft_is_the_likelihood_of_the_responses(finished: TinyRun) -> None:
    steps, rollouts = of_axis(finished, "train/step"), of_axis(finished, "rollout/step")
    assert len(steps) == 2 * STEPS
    # The first step trains on the first two rows: the mean over all their tokens.
    first = [log_probs(finished / "base", *row) for row in list(worked(finished / "base"))[:2]]
    assert steps[0]["train/loss"] == pytest.approx(-np.concatenate(first).mean(), rel=1e-5)
    # Eight rows are two rollout steps, so the fifth optimizer step has the first one's rows again.
    assert steps[4]["train/loss"] < steps[0]["train/loss"] - 0.3
    assert [row["rollout/response_len/max"] for row in rollouts] == [4, 6, 4, 6]
    # There was no engine to update.
    assert not any("perf/update_weights_time" in row for row in rollouts)
    assert not any("train/ppo_kl" in step or "rollout/advantages" in step for step in steps)


def test_completions_of_the_data_and_of_the_model_are_named(tiny: TinyRun) -> None:
    words = ("--num-rollout", "1", "--eval-prompt-data", "few", "train.jsonl@[0:2]", "--eval-interval", "1")
    ended = tiny.run(*SFT, *words, "--print-completions-interval", "1")
    assert ended.code == 0, ended.err
    titles = [line for line in ended.out.splitlines() if line.startswith("completions")]
    assert titles == [
        "completions of few after 0 steps:", "completions of the data at step 0:", "completions of few after 1 steps:",
    ]  # fmt: skip


def test_a_resumed_sft_run_continues_in_the_data(finished: TinyRun, tmp_path: Path) -> None:
    runs = shutil.copytree(finished.runs, tmp_path / "runs")
    (runs / "tiny/summary.json").unlink()
    shutil.rmtree(runs / "tiny/hf")
    words = (*SFT, "--prompt-data", str(finished / "worked.jsonl"))
    ended = finished.run(*words, "--runs-dir", str(runs), "--ckpt-step", "1")
    assert ended.code == 0, ended.err
    one, other = (load_file(path / "tiny/hf/model.safetensors") for path in (finished.runs, runs))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_opd_needs_no_reward_and_closes_in_on_its_teacher(finished: TinyRun) -> None:
    teacher = finished.runs / "tiny/hf"
    words = (*OPD, "--num-rollout", "6", "--num-steps-per-rollout", "2", "--opd-teacher-load", str(teacher))
    ended = finished.run(*words, "--dump-rollouts", "--name", "opd")
    assert ended.code == 0, ended.err
    rollouts = of_axis(finished, "rollout/step", "opd")
    gaps = []
    for group in read_groups(finished.runs / "opd/rollouts/step_000000.parquet"):
        (sample,) = group.samples
        assert sample.reward is None
        student, taught = (
            log_probs(folder, sample.tokens, sample.response_length) for folder in (finished / "base", teacher)
        )
        gaps.append(student - taught)
    assert len({len(gap) for gap in gaps}) > 1
    first = rollouts[0]["rollout/opd_reverse_kl"]
    assert first == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
    assert rollouts[0]["rollout/advantages"] == pytest.approx(-first, rel=1e-6)
    assert 0 < rollouts[-1]["rollout/opd_reverse_kl"] < 0.8 * first


def test_a_teacher_behind_engines_beside_a_task_reward(finished: TinyRun) -> None:
    teacher = finished.runs / "tiny/hf"
    words = (
        "--algo", "grpo", "--reward", "gsm8k", "--advantage-terms", "reverse_kl", "--opd-kl-coef", "0.5",
        "--engines.teacher.load", str(teacher), "--engines.teacher.num_gpus", "2", "--num-rollout", "1", "--name", "both",
        "--rollout-max-response-len", "12", "--dump-rollouts",
    )  # fmt: skip
    ended = finished.run(*words)
    assert ended.code == 0, ended.err
    (row,) = of_axis(finished, "rollout/step", "both")
    gaps = [
        sample.rollout_log_probs - log_probs(teacher, sample.tokens, sample.response_length)
        for group in read_groups(finished.runs / "both/rollouts/step_000000.parquet")
        for sample in group.samples
    ]
    assert len({len(gap) for gap in gaps}) > 1
    assert row["rollout/opd_reverse_kl"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
    # No response is right here, so the task's own advantages are 0.
    assert row["rollout/returns"] == row["rollout/raw_reward"] == 0
    assert row["rollout/advantages"] == pytest.approx(-0.5 * row["rollout/opd_reverse_kl"], rel=1e-5)


# --- Bad input --------------------------------------------------------------------------------------------------------


def test_a_missing_teacher(tiny: TinyRun) -> None:
    ended = tiny.run(*OPD)
    assert ended.code == CONFIG
    assert 'model.opd_teacher_load: reverse_kl of algorithm "opd" compares with a teacher, and none is' in ended.error
    assert not tiny.runs.exists()


def test_a_teacher_of_another_vocabulary(tiny: TinyRun) -> None:
    assert tiny.slime("models", "new", "other", "--alphabet", "9876543210+= ", "--num-layers", "1").code == 0
    ended = tiny.run(*OPD, "--opd-teacher-load", "other")
    assert ended.code == MODEL
    assert f"model.opd_teacher_load = {tiny / 'other'}: its tokenizer is another one than the run's" in ended.error
    assert not tiny.runs.exists()


TALK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
LOOKS_BACK = (
    "{% for m in messages %}={% if loop.last and m.role == 'assistant' %} {% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("rows", "template", "expected"),
    [
        ([{"messages": TALK}, {"prompt": "1"}], "{{ messages[0].content }}", ["line 2", 'no key "messages"']),
        ([{"messages": TALK}, {"messages": TALK[:1]}], "{{ messages[0].content }}", ["line 2", 'no message with role "ass']),
        ([{"messages": TALK}, {"messages": TALK * 2}], LOOKS_BACK, ["line 2", "up to message 1", "{% generation %}"]),
    ],
    ids=["a row without messages", "a row without a response", "a template that looks back"],
)  # fmt: skip
def test_rows_that_cannot_be_trained_on_are_reported(
    tiny: TinyRun, rows: list[dict[str, Any]], template: str, expected: list[str]
) -> None:
    (tiny / "base/chat_template.jinja").write_text(template)
    (tiny / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--algo", "sft", "--n-samples-per-prompt", "1", "--apply-chat-template", "--input-key", "messages")
    ended = tiny.run(*words, "--label-key", "none", "--prompt-data", "talks.jsonl")
    assert ended.code == DATA
    assert not [text for text in ["talks.jsonl", *expected] if text not in ended.error], ended.error
