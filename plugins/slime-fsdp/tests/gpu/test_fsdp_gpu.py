"""On one GPU: the variable-length kernel against SDPA, bfloat16 against float32, sleep and wake, offload."""

import numpy as np
import pytest
import torch

from slime_fsdp.attention import attend_blocks, attend_varlen, plan_attention

pytestmark = pytest.mark.gpu
LENGTHS = [1, 7, 130, 64, 3, 65]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("rank_of_two", [None, 0, 1])
def test_varlen_equals_sdpa(window, rank_of_two):
    device = torch.device("cuda")
    cp_size = 1 if rank_of_two is None else 2
    lengths = [-(-length // (2 * cp_size)) * 2 * cp_size if cp_size > 1 else length for length in LENGTHS]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    whole = int(cu_seqlens[-1])
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(size, heads, 64, device=device, generator=generator).bfloat16().requires_grad_()
        for size, heads in ((whole // cp_size, 8), (whole, 2), (whole, 2))
    )
    found = []
    for varlen, attend in ((True, attend_varlen), (False, attend_blocks)):
        plan = plan_attention(cu_seqlens, device=device, varlen=varlen, cp_rank=rank_of_two or 0, cp_size=cp_size)
        out = attend(q, k, v, plan, 0.125, window)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() < 2e-2 * other.float().norm()


@pytest.mark.parametrize("options", [{}, {"fsdp_cpu_offload": True}, {"compile": True, "gradient_checkpointing": True}])
def test_bfloat16_on_the_gpu_is_near_float32_on_the_cpu(options, folders, start, pack, samples, sequence_policy):
    exact = start(folders("qwen3"), None, {"lr": 1e-3})
    backend = start(folders("qwen3"), options, {"lr": 1e-3}, device="cuda", copies={"reference": folders("qwen3")})
    try:
        for _ in range(3):
            wanted = exact.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
            report = backend.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
            assert report.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)
        found = backend.score([pack(samples)])[0].log_probs
        assert np.abs(found - exact.score([pack(samples)])[0].log_probs).mean() < 0.1
    finally:
        backend.close()


def test_sleep_gives_the_memory_back_and_wake_brings_the_same_model(folders, start, pack, samples, sequence_policy):
    backend = start(folders("qwen3"), device="cuda", copies={"reference": folders("llama")})
    try:
        backend.train_step([pack(samples)], sequence_policy())
        before = backend.score([pack(samples)])[0].log_probs
        awake = torch.cuda.memory_allocated()
        backend.sleep()
        assert torch.cuda.memory_allocated() < awake / 2
        backend.wake()
        np.testing.assert_array_equal(backend.score([pack(samples)])[0].log_probs, before)
        assert torch.cuda.memory_allocated() > awake / 2
        # The optimiser has to step the very tensors that the forward reads.
        for _ in range(2):
            assert not backend.train_step([pack(samples)], sequence_policy()).skipped
        assert np.abs(backend.score([pack(samples)])[0].log_probs - before).max() > 1e-2
    finally:
        backend.close()


def test_resume_on_the_gpu(folders, start, pack, samples, sequence_policy, weights_of, tmp_path):
    backend = start(folders("qwen3"), device="cuda")
    try:
        backend.train_step([pack(samples)], sequence_policy())
        backend.save(tmp_path)
        middle = weights_of(backend)
        backend.train_step([pack(samples)], sequence_policy())
        backend.load(tmp_path)
        assert all(torch.equal(weight, middle[name]) for name, weight in weights_of(backend).items())
    finally:
        backend.close()
