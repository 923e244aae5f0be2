"""Groups, metrics and folders of runs, and a client of the page's server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan
from slime_viewer.app import make_app
from slime_viewer.replies import Page

TOKEN = "a-token"


def make_sample(prompt: Prompt, index: int, *, response: str, reward: float | None, length: int = 4) -> Sample:
    """The last token but one is of a tool."""
    mask = np.ones(length, np.uint8)
    mask[-2] = 0
    return Sample(
        index=index,
        group_index=prompt.group_index,
        rollout_id=index,
        prompt=prompt,
        tokens=np.concatenate([prompt.token_ids, np.arange(length, dtype=np.int32)]),
        prompt_length=len(prompt.token_ids),
        loss_mask=mask,
        rollout_log_probs=-np.arange(1, length + 1, dtype=np.float32) * mask,
        response=response,
        spans=(VersionSpan(index % 3, 0, length - 2), VersionSpan(index % 3 + 1, length - 1, length)),
        status=Status.TRUNCATED if index % 5 == 0 else Status.COMPLETED,
        reward=reward,
        reward_parts={} if reward is None else {"format": reward / 2},
        counts={"turns": float(index % 2)},
    )


def make_groups(step: int, texts: list[list[str]]) -> list[SampleGroup]:
    """A group for each list of responses; rewards are 0, 1, 2, ... in each group, and None for an empty response."""
    groups, index = [], step * 100
    for number, responses in enumerate(texts):
        prompt = Prompt(
            group_index=step * 10 + number,
            text=f"Question {step * 10 + number}?",
            token_ids=np.array([1, 2], np.int32),
            label=f"label {number}",
            origin=f"a.jsonl:{number}",
        )
        samples = []
        for place, response in enumerate(responses):
            reward = float(place) if response else None
            samples.append(make_sample(prompt, index, response=response, reward=reward, length=3 + place))
            index += 1
        groups.append(SampleGroup(prompt=prompt, samples=tuple(samples)))
    return groups


def write_metrics(folder: Path, lines: list[tuple[str, int, int, dict[str, float]]], attempt: int = 1) -> None:
    """Axis, step, rollout and metrics of each line."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for axis, step, rollout, metrics in lines:
            line = {"axis": axis, "step": step, "rollout_id": rollout, "attempt": attempt, "metrics": metrics}
            file.write(json.dumps(line) + "\n")


class Asking:
    """A client with the token."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.client = TestClient(make_app(page, TOKEN), base_url="http://127.0.0.1")

    def __call__(self, path: str, status: int = 200, **parameters: Any) -> Any:
        reply = self.client.get(path, params=parameters, headers={"Authorization": f"Bearer {TOKEN}"})
        assert reply.status_code == status, reply.text
        return reply.json()
