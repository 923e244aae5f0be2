"""On one GPU: the variable-length kernel against SDPA, bfloat16 against float32, rounded state, sleep and wake,
offload."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_fsdp.attention import attend_blocks, attend_runs, plan_attention
from slime_training.rounded_adamw import numbers_of, update_in_pieces
from slime_training.segment_table import whole_sequences, zigzag_part

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
    for varlen, attend in ((True, attend_runs), (False, attend_blocks)):
        table = whole_sequences(cu_seqlens) if rank_of_two is None else zigzag_part(cu_seqlens, rank_of_two, 2)
        plan = plan_attention(table, device=device, varlen=varlen)
        out = attend(q, k, v, plan, 0.125, window)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() < 2e-2 * other.float().norm()


@pytest.mark.parametrize("widths", [(128, 128), (192, 128), (64, 64)])
def test_long_sequences_between_short_ones_equal_the_formula(widths):
    """Some have a kernel call of their own, padded or not; in latent attention keys are wider than values."""
    device = torch.device("cuda")
    lengths = np.array([300, 4096, 7, 64, 5000, 4097])
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    plan = plan_attention(whole_sequences(cu_seqlens), device=device, varlen=True, long=4096)
    assert [run.is_long for run in plan.runs] == [False, True, False, True, True]
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(int(lengths.sum()), heads, width, device=device, generator=generator).bfloat16().requires_grad_()
        for heads, width in ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    )
    out = attend_runs(q, k, v, plan, 0.125, None)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(lengths.tolist()) for x in wide), strict=True)
    required = torch.cat([formula(*part, 0.125) for part in parts])
    found = [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
    for one, other in zip(found, [required, *torch.autograd.grad(required.square().sum(), wide)], strict=True):
        assert (one - other).norm() < 2e-2 * other.norm()


def formula(q, k, v, scale):
    """One sequence, (L, heads, width) each, in float32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"fsdp_cpu_offload": True}),
        ("qwen3", {"compile": True, "gradient_checkpointing": True}),
        ("qwen3", {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
        ("qwen3", {"main_params_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
        ("mistral", {}),
        ("qwen3_moe", {}),
    ],
)
def test_bfloat16_on_the_gpu_is_near_float32_on_the_cpu(
    family, options, folders, start, pack, samples, sequence_policy
):
    exact = start(folders(family), None, {"lr": 1e-3})
    backend = start(folders(family), options, {"lr": 1e-3}, device="cuda", frozen_models={"reference": folders(family)})
    try:
        for _ in range(3):
            required = exact.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
            report = backend.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
            assert report.grad_norm == pytest.approx(required.grad_norm, rel=0.1)
        found = backend.forward_only([pack(samples)])[0].log_probs
        assert np.abs(found - exact.forward_only([pack(samples)])[0].log_probs).mean() < 0.1
    finally:
        backend.close()


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe"])
def test_float32_on_the_gpu_is_float32_on_the_cpu(family, folders, start, pack, samples, sequence_policy):
    exact, backend = (start(folders(family), {"precision": "float32"}, device=device) for device in ("cpu", "cuda"))
    for _ in range(2):
        required = exact.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
        report = backend.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
        assert report.grad_norm == pytest.approx(required.grad_norm, rel=1e-3)
    expected, found = (at.forward_only([pack(samples)], entropy=True)[0] for at in (exact, backend))
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=5e-3)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=5e-3)


def grouped(samples):
    """Three groups of four responses; each response of a group continues the prompt of its first sample."""
    made = []
    for index in range(12):
        leader, other = samples[(0, 2, 5)[index // 4]], samples[index % 7]
        tokens = torch.cat([leader.tokens[: leader.prompt], other.tokens[other.prompt :]])
        made.append(replace(other, tokens=tokens, prompt=leader.prompt))
    return made


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_shared_prompts_on_the_gpu(family, precision, folders, start, pack, samples, sequence_policy, weights_of):
    """Against the CPU without sharing, and twice with the same bits: no atomics in the gradients of a prompt."""
    groups = grouped(samples)
    exact = start(folders(family), {"share_prompts": False})
    backends = [start(folders(family), {"precision": precision}, device="cuda") for _ in range(2)]
    rel, apart = (1e-3, 1e-3) if precision == "float32" else (0.1, 0.1)
    for _ in range(2):
        required = exact.train_step([pack(groups)], sequence_policy())
        reports = [backend.train_step([pack(groups)], sequence_policy()) for backend in backends]
        assert reports[0].grad_norm == reports[1].grad_norm == pytest.approx(required.grad_norm, rel=rel)
    found = backends[0].forward_only([pack(groups)])[0].log_probs
    assert np.abs(found - exact.forward_only([pack(groups)])[0].log_probs).mean() < apart
    one, other = (weights_of(backend) for backend in backends)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sleep_frees_the_memory_and_wake_restores_the_same_model(
    folders, start, pack, samples, sequence_policy, weights_of
):
    backend = start(folders("qwen3"), device="cuda", frozen_models={"reference": folders("llama")})
    try:
        backend.train_step([pack(samples)], sequence_policy())
        before = backend.forward_only([pack(samples)])[0].log_probs
        trained = sum(weight.numel() for weight in weights_of(backend).values())
        frozen = sum(weight.numel() for weight in load_file(folders("llama") / "model.safetensors").values())
        # Weights and AdamW's two moments in float32, the copy in bfloat16. cuBLAS keeps workspaces of its own.
        held = 3 * 4 * trained + 2 * frozen
        awake = torch.cuda.memory_allocated()
        backend.sleep()
        asleep = torch.cuda.memory_allocated()
        assert awake - asleep >= held
        backend.wake_up()
        assert torch.cuda.memory_allocated() - asleep >= held
        np.testing.assert_array_equal(backend.forward_only([pack(samples)])[0].log_probs, before)
        # The optimizer has to step the same tensors that the forward reads.
        for _ in range(2):
            assert not backend.train_step([pack(samples)], sequence_policy()).skipped
        assert np.abs(backend.forward_only([pack(samples)])[0].log_probs - before).max() > 1e-2
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


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_one_kernel_rounds_as_the_operations_do(stored):
    draw = torch.Generator().manual_seed(0)
    weight, gradient, mean = (torch.randn(10_000, generator=draw).to(stored) for _ in range(3))
    square = torch.rand(10_000, generator=draw).bfloat16()
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-8}
    on_host = [weight.clone(), gradient, mean.clone(), square.clone()]
    on_device = [tensor.cuda() for tensor in on_host]
    update_in_pieces(*on_host, *numbers_of(group, 3, torch.device("cpu")))
    update_in_pieces(*on_device, *numbers_of(group, 3, torch.device("cuda")))
    for one, other in zip(on_host, on_device, strict=True):
        # The kernel multiplies and adds in one operation. If that changes a last bit of float32, stochastic rounding draws
        # again, between the same two neighbours (for a fraction of 0.044 and 0.070 of all elements in tests).
        different = (one - other.cpu()).float().abs() > 1e-6
        assert different.float().mean() < 0.15
        torch.testing.assert_close(one, other.cpu(), rtol=2**-7, atol=1e-6)
