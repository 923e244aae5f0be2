"""The snapshot of CUDA memory, on a CUDA device."""

import pickle

import pytest
import torch

from slime_core.workers.profile import Profile, ProfilePlan

pytestmark = pytest.mark.gpu


def test_a_snapshot_contains_the_allocation_that_failed(tmp_path):
    profile = Profile(ProfilePlan(folder=tmp_path, memory=True, memory_steps=1), role="actor", rank=0)
    with profile.around("train_actor"):
        torch.randn(512, 512, device="cuda").sum().item()
    with pytest.raises(torch.OutOfMemoryError), profile.around("train_actor"):
        torch.empty(10**13, device="cuda")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["actor-rank0-memory-0.pickle", "actor-rank0-memory-1-failed.pickle"]
    snapshot = pickle.loads((tmp_path / names[1]).read_bytes())  # noqa: S301 - written by torch, a line above
    assert any(trace for trace in snapshot["device_traces"])
