"""Profilers around a trainer rank's calls."""

import json

import pytest
import torch

from slime_core.workers.profile import Profile, ProfilePlan


def work():
    return (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()


def test_the_requested_calls_are_profiled(tmp_path):
    plan = ProfilePlan(folder=tmp_path / "profile", targets=("train_log_probs",), first=1, end=3)
    profile = Profile(plan, role="critic", rank=2)
    for _ in range(4):
        for target in ("train_actor", "train_log_probs"):
            with profile.around(target):
                work()
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["critic-rank2-train_log_probs-1.json", "critic-rank2-train_log_probs-2.json"]
    events = json.loads((tmp_path / "profile" / names[0]).read_text())["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


def test_memory_is_written_down_when_a_call_fails_and_after_so_many_steps(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: asked.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(path))
    plan = ProfilePlan(folder=tmp_path, memory=True, memory_steps=2)
    profile = Profile(plan, role="actor", rank=0)
    assert list(asked.pop()) == ["max_entries"]
    for _ in range(3):
        with profile.around("train_log_probs"), profile.around("train_actor"):
            work()
    assert asked == [str(tmp_path / "actor-rank0-memory-1.pickle")]
    with pytest.raises(RuntimeError, match="no memory"), profile.around("train_actor"):
        raise RuntimeError("no memory")
    assert asked[1:] == [str(tmp_path / "actor-rank0-memory-3-failed.pickle")]


def test_nothing_is_written_unless_requested(tmp_path):
    profile = Profile(ProfilePlan(folder=tmp_path / "profile"), role="actor", rank=0)
    with pytest.raises(RuntimeError), profile.around("train_actor"):
        raise RuntimeError
    assert not (tmp_path / "profile").exists()
