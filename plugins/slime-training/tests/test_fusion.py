"""Which calls compile again, and which do not. The kernels themselves: tests/gpu."""

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.runtime.cache_dir_utils import cache_dir

from slime_training.fusion import CACHE, fused_by_rows, keep_compiled

compile_ = torch.compile


@pytest.fixture
def counter(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=counter))
    yield counter
    torch._dynamo.reset()


def test_lengths_share_a_kernel_and_every_kind_of_call_is_compiled(counter):
    """Norms of a model with latent attention and of a critic beside it, with and without gradient: more than torch's own
    limit."""

    def doubled(x, *, scale):
        return x * 2 * scale

    widths, lengths = (4, 8, 12, 16, 20, 24), (7, 300, 513)
    for width in widths:
        for trained in (True, False):
            for length in lengths:
                x = torch.ones(length, width, requires_grad=trained)
                with torch.set_grad_enabled(trained):
                    assert torch.equal(fused_by_rows(doubled, x, scale=3.0), torch.full((length, width), 6.0))
    assert counter.frame_count == 2 * len(widths)


def test_what_is_compiled_is_kept_for_the_next_start(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CACHE, raising=False)
    keep_compiled()
    assert cache_dir() == str(tmp_path / "slime" / "torchinductor")
    monkeypatch.setenv(CACHE, "/elsewhere")
    keep_compiled()
    assert os.environ[CACHE] == "/elsewhere"
