"""Where the same command starts when plugins, keys or the end of a run have changed: no run begins again unnoticed, and
--dry-run reports and rejects what a start does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = pytest.mark.usefixtures("tiny_forks")

REWARD = """
from pathlib import Path
from slime_core.plugin import reward

@reward("fails")
def fails(sample):
    if Path("{folder}/fail").exists() and sample.group_index >= 4:
        raise ValueError("as asked")
    return float(sample.index % 2)
"""
WORDS = ("--plugin", "fails.py", "--reward", "fails", "--num-rollout", "3")


def dry_run(tiny: TinyRun, *words: str) -> dict[str, Any]:
    ended = tiny.run(*words, "--dry-run")
    assert ended.code == 0, ended.err
    printed: dict[str, Any] = json.loads(ended.out)
    return printed


def test_a_run_whose_plugin_changes_and_that_ends(tiny: TinyRun) -> None:
    text = REWARD.format(folder=tiny.folder)
    (tiny / "fails.py").write_text(text)
    (tiny / "fail").write_text("")
    assert dry_run(tiny, *WORDS)["continues_from_step"] is None
    assert tiny.run(*WORDS).code == 4
    (tiny / "fail").unlink()
    folder = tiny.runs / "tiny"
    assert {key: dry_run(tiny, *WORDS)[key] for key in ("folder", "continues_from_step")} == {
        "folder": str(folder),
        "continues_from_step": 2,
    }

    (tiny / "fails.py").write_text(text + "\n# Fixed.\n")
    for words in (WORDS, (*WORDS, "--dry-run"), (*WORDS, "--resume", "runs/tiny")):
        ended = tiny.run(*words)
        assert ended.code == 2
        assert (
            "this run is unfinished, 2 steps are saved, and it began with others: plugin file fails.py: " in ended.error
        )
        assert "To continue it with what there is now, add --accept-changes plugins." in ended.error
    accept = (*WORDS, "--accept-changes", "plugins")
    (accepted,) = dry_run(tiny, *accept)["accepted_changes"]
    assert accepted.startswith("plugin file fails.py: ")
    before = json.loads((folder / "manifest.json").read_text())
    assert tiny.run(*accept).code == 0
    assert tiny.steps() == [0, 1, 2]
    manifest = json.loads((folder / "manifest.json").read_text())
    (record,) = manifest["accepted_changes"]
    assert record["rollout_id"] == 2
    (change,) = record["changes"]
    assert before["plugin_files"]["fails.py"].startswith(change["old"])
    assert manifest["plugin_files"]["fails.py"].startswith(change["new"])

    for words in (WORDS, (*WORDS, "--dry-run")):
        ended = tiny.run(*words)
        assert ended.code == 2
        assert f"{folder}: this run is finished, with 3 steps. To train it longer, add for example --num-rollout 4" in (
            ended.error
        )
    longer = (*WORDS[:-1], "4", "--resume", str(folder))
    assert dry_run(tiny, *longer)["continues_from_step"] == 3
    assert tiny.run(*longer).code == 0
    assert tiny.steps() == [0, 1, 2, 3]
    assert json.loads((folder / "manifest.json").read_text())["accepted_changes"] == [record]

    ended = tiny.run(*WORDS, "--lr", "0.5", "--dry-run")
    assert json.loads(ended.out)["folder"] == str(tiny.runs / "tiny-2")
    assert ended.err == (
        f"note: {folder} is finished, and began with others: train.lr: 0.001 -> 0.5. This one starts in {folder}-2.\n"
    )
    assert not (tiny.runs / "tiny-2").exists()


def test_what_a_run_that_failed_may_change(tiny: TinyRun) -> None:
    """Time limits by the same command; policies for failures and what takes memory with --resume."""
    (tiny / "fails.py").write_text(REWARD.format(folder=tiny.folder))
    (tiny / "fail").write_text("")
    assert tiny.run(*WORDS).code == 4
    limits = ("--rollout-health-check-timeout", "120", "--engine-call-timeout", "1800", "--max-engine-restarts", "9")
    assert dry_run(tiny, *WORDS, *limits)["continues_from_step"] == 2
    ways = ("--on-reward-error", "zero", "--max-retries", "5", "--max-filtered-groups", "100", "--concurrency", "3")
    memory = ("--max-tokens-per-gpu", "64", "--gradient-checkpointing", "true", "--log-probs-chunk-size", "16")
    ended = tiny.run(*WORDS, *ways, *memory, "--dry-run")
    assert json.loads(ended.out)["folder"] == str(tiny.runs / "tiny-2")
    assert f"To continue that one with these, add --resume {tiny.runs}/tiny." in ended.err
    ended = tiny.run(*WORDS, *ways, *memory, "--resume", "runs/tiny")
    assert ended.code == 0, ended.err
    assert tiny.steps() == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--accept-changes", "data"), "--accept-changes data: 'data' cannot be accepted; pass plugins."),
        (("--accept-changes", "plugins", "--fresh"), "--fresh removes the run that --accept-changes would resume"),
        (("--accept-changes", "plugins"), "--accept-changes: no unfinished run is in "),
        (("--ckpt-step", "4"), "--ckpt-step 4: no unfinished run with this config"),
        (("--resume", "runs/none"), "--resume runs/none: no run there"),
        (
            ("--rollout-stop-token-ids", "-1"),
            "rollout.rollout_stop_token_ids: [-1] are outside the model's vocabulary of 1",
        ),
        (
            ("--rollout-stop-token-ids", "3", "99"),
            "rollout.rollout_stop_token_ids: [99] are outside the model's vocabulary",
        ),
        (
            ("--reward-timeout", "1e300"),
            'rollout.reward_timeout = "1e300": input should be less than or equal to 1000000000',
        ),
        (("--rollout-temperature", "1e-300"), "rollout.rollout_temperature = "),
        (
            ("--shaping", "overlong", "--rollout-max-response-len", "8"),
            "algo.overlong_buffer_len = 4096: must be less than rollout.rollout_max_response_len = 8",
        ),
        (("--rollout-batch-size", "1" + "0" * 12), "Pass a smaller number."),
        (
            ("--set", "train.num_rollout=true"),
            "train.num_rollout = True: requires a number or text, not true or false.",
        ),
        (("--replay-schedule", "none.jsonl"), "--replay-schedule none.jsonl: cannot be read"),
    ],
)
def test_a_dry_run_rejects_what_a_start_rejects(tiny: TinyRun, words: tuple[str, ...], message: str) -> None:
    ended = tiny.run(*words, "--dry-run")
    assert ended.code in (2, 7)
    assert message in ended.error
