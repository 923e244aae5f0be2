"""Dumps of rollouts as upstream writes them: torch files with a dict of each sample's fields."""

from __future__ import annotations

import asyncio
import datetime
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from slime_compat.plugin import CompatDump
from slime_core.errors import DataError
from slime_core.types.sample import Status

ROW = {
    "group_index": 0,
    "index": 0,
    "rollout_id": None,
    "prompt": "1+1=",
    "tokens": [3, 4, 5, 6, 7],
    "response": "2 <end>",
    "response_length": 3,
    "label": "2",
    "reward": 1.0,
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-0.5, 0.0, -1.5],
    "remove_sample": False,
    "status": "truncated",
    "metadata": {"turns": 2},
    "spec_info": {"spec_accept_token_num": 0},
    "session_id": "s",
}


@pytest.fixture
def collect(tmp_path):
    """`collect(rows, ...)` gives the groups of a step whose dump has these rows."""

    def run(rows, *, step=7, batch=1, reward_key=None, content=None, **options):
        torch.save({"rollout_id": step, "samples": rows} if content is None else content, tmp_path / f"{step}.pt")
        config = CompatDump.Config(path=str(tmp_path / "{rollout_id}.pt"), **options)
        seen = []
        context = SimpleNamespace(
            config=SimpleNamespace(rollout_batch_size=batch, reward_key=reward_key),
            observe=lambda *news: seen.append(news),
        )
        groups = asyncio.run(CompatDump.build(config).collect(step, context))
        assert seen == [(step, groups, [])]
        return groups

    return run


def test_fields_of_samples(collect):
    chat = [{"role": "user", "content": "1+1="}]
    tensors = {
        "tokens": torch.tensor([3, 4, 5]),
        "response_length": 1,
        "rollout_log_probs": torch.tensor([-0.25]),
        "rollout_routed_experts": torch.tensor([[[0, 300]], [[1, 2]]], dtype=torch.int32),
        "loss_mask": None,
        "rollout_id": 4,
        "index": 1,
        "reward": {"score": 0.5, "pred": "2", "ok": True},
        "remove_sample": True,
        "status": "completed",
        "prompt": chat,
    }
    plain = {**ROW, "reward": {"score": 1, "ok": False}}
    other = {**ROW, "group_index": 9, "index": 18, "reward": {"score": 2.0}, "response_length": 0, "loss_mask": []}
    groups = collect([plain, {**ROW, **tensors}, {**other, "rollout_log_probs": None}], batch=2, reward_key="score")
    assert [[sample.index for sample in group.samples] for group in groups] == [[0, 1], [18]]
    first, second = groups[0].samples
    assert (first.prompt.text, first.prompt.label, first.response) == ("1+1=", "2", "2 <end>")
    assert (first.prompt_length, first.rollout_id, first.status, first.metadata) == (
        2,
        0,
        Status.TRUNCATED,
        {"turns": 2},
    )
    assert (first.tokens.tolist(), first.tokens.dtype) == ([3, 4, 5, 6, 7], np.int32)
    assert (first.loss_mask.tolist(), first.loss_mask.dtype) == ([1, 0, 1], np.uint8)
    assert first.rollout_log_probs.tolist() == [-0.5, 0.0, -1.5]
    assert (first.reward, first.reward_parts) == (1.0, {"score": 1.0, "ok": 0.0})
    assert first.prompt.token_ids.tolist() == [3, 4]
    assert (second.rollout_id, second.remove_sample, second.reward) == (4, True, 0.5)
    assert (second.loss_mask.tolist(), second.rollout_log_probs.tolist()) == ([1], [-0.25])
    assert second.routed_experts.tolist() == [[[0, 300]], [[1, 2]]]
    assert (second.prompt.messages, second.prompt.text) == (chat, "")
    assert second.reward_parts == {"score": 0.5, "ok": 1.0}


def test_a_share_of_the_samples_is_of_both_ends(collect):
    rows = [{**ROW, "group_index": number, "index": number} for number in range(10)]
    # Upstream: data[: n // 2] + data[-n // 2 :], with n = int(10 * 0.55) = 5.
    groups = collect(rows, batch=5, subsample=0.55)
    assert [group.group_index for group in groups] == [0, 1, 7, 8, 9]


def test_log_probs_that_are_missing(collect):
    without = {**ROW, "rollout_log_probs": None}
    with pytest.raises(DataError, match=r"sample 0: it has no rollout_log_probs\..*missing-log-probs zero"):
        collect([without])
    ((sample,),) = (group.samples for group in collect([without], missing_log_probs="zero"))
    assert sample.rollout_log_probs.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_length": 5}, "5 tokens and a response_length of 5: no prompt is left"),
        ({"loss_mask": [1]}, "loss_mask has 1 numbers for 3 tokens"),
        ({"loss_mask": [1, 0.5, 1]}, "loss_mask must be whole numbers"),
        ({"tokens": [3, 2**40, 4, 5]}, "tokens must be"),
        ({"tokens": "abc"}, "tokens must be numbers"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs has 1 numbers for 3 tokens"),
        ({"index": None}, "group_index = 0 and index = None: both must be numbers"),
        ({"reward": {"a": 1.0}}, r"several numbers \(a\), and rollout.reward_key = None. Pass --reward-key"),
        ({"status": "lost"}, "status = lost: must be one of pending, completed"),
        ({"multimodal_train_inputs": {"x": 1}}, "multimodal_train_inputs cannot be used"),
        ({"rollout_top_p_token_ids": [1]}, "rollout_top_p_token_ids cannot be used"),
        ({"rollout_routed_experts": [[1]]}, r"has shape \(1, 1\) for 5 tokens"),
        ({"metadata": {"when": datetime.date(2026, 1, 1)}}, r"one of them datetime\.date\. Reading them could run any code"),
    ],
)  # fmt: skip
def test_a_sample_that_cannot_be_used_is_named(collect, fields, expected):
    with pytest.raises(DataError, match=expected):
        collect([{**ROW, **fields}])


def test_a_file_that_cannot_be_used_is_named(collect, tmp_path):
    with pytest.raises(DataError, match=r"must have a list `samples`"):
        collect([], content=[ROW])
    with pytest.raises(DataError, match=r"2 groups, and rollout.rollout_batch_size is 1. Pass --rollout-batch-size 2"):
        collect([ROW, {**ROW, "group_index": 1}])
    with pytest.raises(DataError, match="are not side by side"):
        collect([ROW, {**ROW, "group_index": 1}, ROW], batch=3)
    (tmp_path / "8.pt").write_bytes(b"PK\x03\x04 cut short")
    config = CompatDump.Config(path=str(tmp_path / "{rollout_id}.pt"))
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/8.pt: cannot be read")):
        asyncio.run(CompatDump.build(config).collect(8, None))
    with pytest.raises(DataError, match=r"9.pt: no such dump. In its folder there are: 7.pt, 8.pt"):
        asyncio.run(CompatDump.build(config).collect(9, None))


def test_reading_runs_no_code(collect, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with pytest.raises(DataError, match="Reading them could run any code"):
        collect([{**ROW, "label": Trap()}])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["{step}.pt", "{}.pt"])
def test_a_path_has_a_place_for_the_number(path):
    with pytest.raises(ValidationError, match=r"\{?rollout_id\}?"):
        CompatDump.Config(path=path)
    each = CompatDump.Config(path="a/{rollout_id:04d}.pt")
    assert each.path_of(7).endswith("a/0007.pt")
    assert not CompatDump.notices(each)


def test_a_path_without_a_place_is_the_file_of_every_step():
    one = CompatDump.Config(path="a/dump.pt")
    assert one.path_of(0) == one.path_of(7)
    (notice,) = CompatDump.notices(one)
    assert "every step trains on this file" in notice
