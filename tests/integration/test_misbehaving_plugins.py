"""Runs whose plugins misbehave at their second step: one paragraph names the plugin and what it was called on, and the step
before is saved. tests/unit/test_boundary.py has the other kinds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

PLUGINS = """
import asyncio
import sys
from pathlib import Path

from slime_core.contracts.source import DataSource, SourceDriver
from slime_core.plugin import driver, generator, group_filter

BROKEN = Path("broken").read_text()


@group_filter("bad")
def bad_filter(group):
    if BROKEN == "filter" and group.group_index == 2:
        sys.exit(3)
    return True


async def tool():
    sys.exit(3)


@generator("bad")
async def bad_generator(episode):
    trajectory = episode.trajectory()
    trajectory.append_completion(await episode.complete(trajectory.tokens))
    sample = trajectory.finish()
    if BROKEN == "generator" and sample.index >= 4:
        await asyncio.create_task(tool())
    return [sample]


class Source(DataSource):
    num_rows = None

    def __init__(self, renderer):
        self.renderer, self.next = renderer, 0

    def take(self, num_prompts):
        first, self.next = self.next, self.next + num_prompts
        rows = [
            self.renderer.render({"prompt": "1+1=", "label": "2"}, group_index=n, origin=f"row {n}")
            for n in range(first, self.next)
        ]
        return [rows[0], None] if first and BROKEN == "source" else rows

    def state(self):
        if BROKEN == "state" and self.next > 2:
            raise OSError("the catalogue does not respond")
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]

    def fingerprint(self):
        return "always the same"


@driver("slime.sources", "bad")
class SourceMaker(SourceDriver):
    @classmethod
    def build(cls, config):
        return lambda renderer, *, seed: Source(renderer)
"""
CASES = {
    "filter": (
        ["--filters", "bad"],
        2,
        'group filter "bad.py/bad", decide on {folder}/train.jsonl, line 3: raised SystemExit: 3',
    ),
    "source": (
        ["--source", "bad"],
        2,
        'data source "bad.py/bad", take(2), position 1: returned None; a Prompt is required.',
    ),
    # SystemExit in a task would end the event loop.
    "generator": (["--generate", "bad"], 4, "Of 4 failed responses 4 failed so: SystemExit: 3 (bad.py:"),
}


def without_file(tiny: TinyRun) -> None:
    """The run file for a source that reads none."""
    text = (tiny / "run.toml").read_text()
    (tiny / "run.toml").write_text(text.replace('prompt_data = "train.jsonl"\n', ""))


@pytest.mark.parametrize("broken", CASES)
def test_a_plugin_that_misbehaves_is_named_and_what_was_trained_is_saved(tiny: TinyRun, broken: str) -> None:
    words, code, expected = CASES[broken]
    (tiny / "bad.py").write_text(PLUGINS)
    (tiny / "broken").write_text(broken)
    if broken == "source":
        without_file(tiny)
    ended = tiny.run("--plugin", "bad.py", "--num-rollout", "2", "--save-interval", "none", *words)
    assert expected.replace("{folder}", str(tiny.folder)) in ended.error
    assert ended.code == code
    assert tiny.checkpoints() == ["step_1"]
    if broken == "generator":
        # Reported during the step, which ends after as many failed groups as it requires.
        assert "a response failed: SystemExit: 3 (bad.py:" in ended.out
        assert "a response failed, 10 times by now" in ended.out


def test_a_source_without_a_position_ends_the_run_and_the_last_checkpoint_stays(tiny: TinyRun) -> None:
    (tiny / "bad.py").write_text(PLUGINS)
    (tiny / "broken").write_text("state")
    without_file(tiny)
    words = ("--plugin", "bad.py", "--source", "bad", "--num-rollout", "3")
    ended = tiny.run(*words)
    assert ended.code == 2
    named = (
        r'data source "bad\.py/bad", state: raised OSError: the catalogue does not respond \(bad\.py:\d+ in state\)\. '
    )
    assert re.fullmatch(
        named + "Without the position no checkpoint can be written; those that are there stay.\n", ended.error
    )
    # Two steps are trained, and the second cannot be saved.
    assert tiny.steps() == [0, 1]
    assert tiny.checkpoints() == ["step_1"]
    assert [path.name for path in (tiny.runs / "tiny/checkpoints").iterdir()] == ["step_1"]
    (tiny / "broken").write_text("")
    ended = tiny.run(*words)
    assert (ended.code, ended.err) == (0, "")
    assert tiny.steps() == [0, 1, 2]
