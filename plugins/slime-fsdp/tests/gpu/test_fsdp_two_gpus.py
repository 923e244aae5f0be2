"""Two GPUs over NCCL against one rank on the CPU, all in float32 but for the last test."""

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL requires a GPU of its own for each of two ranks"),
]


@pytest.fixture(scope="module")
def ranks(run_two_ranks):
    return run_two_ranks("cuda")


def joined(parts, name):
    rows = np.concatenate([part["rows"] for part in parts])
    assert sorted(rows) == list(range(len(rows)))
    whole = np.empty(len(rows), np.float32)
    whole[rows] = np.concatenate([part[name] for part in parts])
    return whole


@pytest.mark.parametrize("name", ["dp", "sync", "cp"])
def test_a_step_on_two_gpus_is_the_step_on_the_cpu(name, ranks, one_step):
    report, start, expected, *_ = one_step
    first, second = ranks(name)
    scale = max(float((expected[key] - start[key]).norm()) for key in expected)
    assert first["weights"].keys() == expected.keys()
    for key in expected:
        assert float((first["weights"][key] - expected[key]).norm()) < 1e-4 * scale, key
    totals = {key: first["sums"][key] + second["sums"][key] for key in report.sums}
    assert totals == pytest.approx(report.sums, rel=1e-4)
    assert first["grad_norm"] == second["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)


def test_scores(ranks, one_step):
    for part in ranks("dp"):
        np.testing.assert_allclose(part["before"], one_step[3].log_probs, atol=1e-4)
        np.testing.assert_allclose(part["after"], one_step[4].log_probs, atol=1e-3)
    np.testing.assert_allclose(joined(ranks("cp"), "log_probs"), one_step[3].log_probs, atol=1e-4)
    np.testing.assert_allclose(joined(ranks("cp"), "entropy"), one_step[3].entropy, atol=1e-4)


def test_a_sliding_window_under_context_parallelism(ranks, folders, start, pack, samples):
    (expected,) = start(folders("mistral")).forward_only([pack(samples)])
    np.testing.assert_allclose(joined(ranks("window"), "log_probs"), expected.log_probs, atol=1e-4)


def test_one_ranks_nan_makes_both_skip(ranks):
    for after, skipped in zip(ranks("dp"), ranks("skip"), strict=True):
        assert skipped["skipped"]
        for name, weight in after["weights"].items():
            assert torch.equal(weight, skipped["weights"][name])


def test_resume(ranks):
    straight, middle, resumed = (ranks(name)[0]["weights"] for name in ("straight", "middle", "resumed"))
    for name in straight:
        torch.testing.assert_close(resumed[name], straight[name], rtol=1e-4, atol=1e-5)
    assert not all(torch.allclose(straight[name], middle[name], rtol=1e-4, atol=1e-5) for name in straight)


def test_a_broken_folder_is_reported_by_every_rank(ranks):
    for rank in range(2):
        assert str(ranks.folder / "broken") in (ranks.folder / f"broken.{rank}.txt").read_text()


def test_bfloat16_under_context_parallelism(ranks, one_step):
    found = joined(ranks("half"), "log_probs")
    assert 0 < np.abs(found - one_step[3].log_probs).mean() < 0.05
    for part in ranks("half"):
        assert part["grad_norm"] == pytest.approx(one_step[0].grad_norm, rel=0.1)
