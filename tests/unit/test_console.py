"""What the console reports during a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.console import NUM_KINDS, Console
from slime_core.contracts.hookspecs import Run, SampleFailed
from slime_core.errors import RolloutError


def failed(error: Exception, *, will_retry: bool = True) -> SampleFailed:
    run = Run(name="it", run_dir=Path("it"), config={})
    prompt: Any = None
    return SampleFailed(run=run, prompt=prompt, sample_index=0, attempt=1, will_retry=will_retry, error=error)


def test_failures_are_reported_by_kind_at_the_1st_10th_100th(capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = None
    console = Console(run, quiet=False)
    for row in range(120):
        error = RolloutError(f'generator "mine.py/it", generate on row {row}: raised')
        error.__cause__ = ValueError(f"row {row}: [no] digits")
        console.sample_failed(failed(error))
    console.sample_failed(failed(KeyError("x"), will_retry=False))
    assert capsys.readouterr().out.splitlines() == [
        "a response failed: ValueError: row 0: [no] digits; it is tried again",
        "a response failed, 10 times by now: ValueError: row 9: [no] digits; it is tried again",
        "a response failed, 100 times by now: ValueError: row 99: [no] digits; it is tried again",
        "a response failed: KeyError: 'x'; events.jsonl has all of them",
    ]
    for kind in range(10 * NUM_KINDS):
        console.sample_failed(failed(KeyError("x" * kind)))
    assert len(capsys.readouterr().out.splitlines()) < NUM_KINDS + 5
