"""Two processes over gloo against one: data parallel, context parallel, resume, weights, errors."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def ranks(run_two_ranks):
    return run_two_ranks("cpu")


def assert_same_step(found, one_step):
    _, start, expected, *_ = one_step
    scale = max(float((expected[name] - start[name]).norm()) for name in expected)
    assert scale > 1e-2
    assert found.keys() == expected.keys()
    for name in expected:
        assert float((found[name] - expected[name]).norm()) < 1e-5 * scale, name


def totals(saved):
    return {name: sum(part["sums"][name] for part in saved) for name in saved[0]["sums"]}


@pytest.mark.parametrize("name", ["dp", "sync", "cp"])
def test_a_step_on_two_ranks_is_the_step_on_one(name, ranks, one_step):
    saved = ranks(name)
    assert_same_step(saved[0]["weights"], one_step)
    assert totals(saved) == pytest.approx(one_step[0].sums, rel=1e-5)
    assert saved[0]["grad_norm"] == saved[1]["grad_norm"] == pytest.approx(one_step[0].grad_norm, rel=1e-5)


@pytest.mark.bits
def test_held_adapters_on_two_ranks(ranks, one_held):
    report, log_probs, base = one_held
    saved = ranks("held_a")
    assert totals(saved) == pytest.approx(report.sums, rel=1e-4)
    for rank in saved:
        assert rank["grad_norm"] == saved[0]["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
        np.testing.assert_allclose(rank["log_probs"], log_probs, rtol=1e-3, atol=1e-3)
        assert np.array_equal(rank["log_probs"], saved[0]["log_probs"])
    for name in "ab":
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            one, other = (load_file(ranks.folder / f"held_{name}{kind}" / file) for kind in ("", "_alone"))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
    for rank in ranks("held"):
        np.testing.assert_allclose(rank["base"], base, rtol=1e-5, atol=1e-5)
        assert np.array_equal(rank["base"], rank["reference"])
        # The base is sharded, once.
        assert 0.4 * rank["whole"] < rank["local"] < 0.6 * rank["whole"]
        assert rank["failure"].startswith("/proc/nowhere/adapter: cannot be written")
        assert rank["same"]


def test_several_targets_at_positions_that_ranks_share(ranks, one_target_step):
    report, scores = one_target_step
    saved = ranks("targets")
    assert totals(saved) == pytest.approx(report.sums, rel=1e-4)
    for name in ("log_probs", "entropy"):
        expected = getattr(scores, name)
        found = np.full(len(expected), np.nan, np.float32)
        for rank in saved:
            assert rank["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
            found[rank["rows"]] = rank[name]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_adapters_with_shared_tokens_and_over_half_precision(ranks, one_held):
    report, log_probs, _ = one_held
    saved = ranks("held_cp")
    assert totals(saved) == pytest.approx(report.sums, rel=1e-4)
    found = np.full(len(log_probs), np.nan, np.float32)
    for rank in saved:
        assert rank["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
        found[rank["rows"]] = rank["log_probs"]
    np.testing.assert_allclose(found, log_probs, rtol=1e-3, atol=1e-3)
    first, second = ranks("held_half")
    assert first["losses"][2] < first["losses"][0]
    assert set(first["kept"]) == {"torch.float32"}
    assert set(first["sent"]) == {"bfloat16"}
    assert second["sent"] == []


def test_scores_follow_the_step_and_the_copy_does_not(ranks, one_step):
    for part in ranks("dp"):
        np.testing.assert_allclose(part["before"], one_step[3].log_probs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(part["after"], one_step[4].log_probs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(part["frozen"], part["before"], rtol=1e-6, atol=1e-6)
        assert np.abs(part["after"] - part["before"]).max() > 1e-2


def test_one_ranks_nan_makes_both_skip(ranks):
    for after, skipped in zip(ranks("dp"), ranks("skip"), strict=True):
        assert skipped["skipped"]
        np.testing.assert_array_equal(skipped["refreshed"], after["after"])
        for name, weight in after["weights"].items():
            assert torch.equal(weight, skipped["weights"][name])


def test_both_ranks_report_what_one_of_them_holds(ranks):
    for rank in ranks("overflow"):
        assert rank["before"] is None
        assert rank["after"] == "weight model.norm.weight is not finite"


@pytest.mark.bits
def test_save_hf_on_two_ranks_is_what_is_exported(ranks):
    weights = ranks("skip")[0]["weights"]
    saved = load_file(ranks.folder / "hf" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_two_ranks_write_files_of_one_model(ranks):
    weights = ranks("skip")[0]["weights"]
    shards = sorted((ranks.folder / "hf_shards").glob("model-*-of-*.safetensors"))
    assert len(shards) == 3
    saved = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_a_file_that_one_rank_cannot_write_is_an_error_on_both(ranks):
    assert all("no space left to write it" in part["failure"] for part in ranks("shards"))
    assert not list((ranks.folder / "hf_refused").iterdir())


def test_unevenly_cut_tensors_are_gathered_whole(ranks):
    ranks("dp")
    for part in ranks("gathered"):
        for name, tensor in part["whole"].items():
            assert torch.equal(part["same"][name], tensor)
            expected = tensor if name == "odd" else tensor.to(torch.bfloat16)
            assert part["half"][name].dtype == expected.dtype
            assert torch.equal(part["half"][name], expected)


def test_context_parallel_ranks_hold_each_token_once(ranks, one_step):
    parts = ranks("cp")
    rows = np.concatenate([part["rows"] for part in parts])
    assert sorted(rows) == list(range(len(one_step[3].log_probs)))
    assert all(0 < len(part["rows"]) < len(rows) for part in parts)
    for name in ("log_probs", "entropy"):
        joined = np.empty(len(rows), np.float32)
        joined[rows] = np.concatenate([part[name] for part in parts])
        np.testing.assert_allclose(joined, getattr(one_step[3], name), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_near_float32(ranks, one_step):
    joined = np.empty(len(one_step[3].log_probs), np.float32)
    for part in ranks("half"):
        joined[part["rows"]] = part["log_probs"]
        assert part["grad_norm"] == pytest.approx(one_step[0].grad_norm, rel=0.1)
    assert 0 < np.abs(joined - one_step[3].log_probs).mean() < 0.05


def test_context_parallel_with_a_sliding_window(ranks, folders, start, pack, samples):
    (expected,) = start(folders("mistral")).forward_only([pack(samples)])
    for part in ranks("window"):
        np.testing.assert_allclose(part["log_probs"], expected.log_probs[part["rows"]], rtol=1e-5, atol=1e-5)


@pytest.mark.bits
@pytest.mark.parametrize("prefix", ["", "rounded_"])
def test_resume_on_two_ranks_is_exact(prefix, ranks, one_step):
    straight, middle, resumed = (ranks(prefix + name)[0]["weights"] for name in ("straight", "middle", "resumed"))
    for part in ranks(prefix + "straight"):
        assert part["grad_norm"] == pytest.approx(one_step[0].grad_norm, rel=0.02 if prefix else 1e-5)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not all(torch.equal(straight[name], middle[name]) for name in straight)


@pytest.mark.bits
@pytest.mark.parametrize("prefix", ["", "rounded_"])
def test_two_ranks_write_the_same_checkpoint_while_they_train(prefix, ranks, contents):
    saved, staged = contents(ranks.folder / f"{prefix}checkpoint"), contents(ranks.folder / f"{prefix}staged")
    assert len(saved) > 4
    assert staged == saved


def test_one_rank_continues_what_two_ranks_saved(ranks, folders, start, pack, samples, weights_of, sequence_policy):
    middle, straight = ranks("middle")[0]["weights"], ranks("straight")[0]["weights"]
    backend = start(folders("qwen3"))
    backend.load(ranks.folder / "checkpoint")
    assert all(torch.equal(weight, middle[name]) for name, weight in weights_of(backend).items())
    for _ in range(2):
        backend.train_step([pack(samples)], sequence_policy())
    for name, weight in weights_of(backend).items():
        torch.testing.assert_close(weight, straight[name], rtol=2e-3, atol=2e-4)


def test_a_value_head_on_two_ranks(ranks, folders, start, pack, samples):
    backend = start(folders("qwen3"), head="value")
    for part in ranks("value"):
        np.testing.assert_array_equal(part["loaded"], part["saved"])
        assert np.abs(part["trained"] - part["saved"]).max() > 1e-3
    backend.load(ranks.folder / "critic")
    np.testing.assert_allclose(backend.forward_only([pack(samples)])[0].values, part["saved"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "rounded_"])
def test_a_rank_without_elements_of_a_weight_counts_its_steps(prefix, ranks):
    """The checkpoint may take that rank's step count."""
    one, other = ranks(f"{prefix}value")
    np.testing.assert_array_equal(one["loaded"], one["saved"])
    assert one["counts"] == other["counts"] == [1.0] * len(one["counts"])
    assert len(one["counts"]) > 10


def test_a_broken_folder_is_reported_by_every_rank(ranks):
    for rank in range(2):
        assert str(ranks.folder / "broken") in (ranks.folder / f"broken.{rank}.txt").read_text()


def test_adapters_on_two_ranks(ranks, folders, adapters, start, pack, samples, weights_of, sequence_policy, sgd):
    backend = start(folders("qwen3"), {"lora_adapter_path": str(adapters("qwen3"))}, sgd)
    before = backend.forward_only([pack(samples)])[0].log_probs
    start_weights = weights_of(backend)
    report = backend.train_step([pack(samples)], sequence_policy())
    saved = ranks("lora")
    assert_same_step(saved[0]["weights"], (None, start_weights, weights_of(backend)))
    assert totals(saved) == pytest.approx(report.sums, rel=1e-5)
    after = backend.forward_only([pack(samples)])[0].log_probs
    plain = start(folders("qwen3")).forward_only([pack(samples)])[0].log_probs
    for part in saved:
        assert part["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-5)
        np.testing.assert_allclose(part["before"], before, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(part["after"], after, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(part["reference"], plain, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(part["again"], part["after"])
        np.testing.assert_array_equal(part["refreshed"], part["after"])
        np.testing.assert_allclose(part["other"], part["after"], rtol=1e-5, atol=1e-5)
    hf = load_file(ranks.folder / "lora_hf" / "model.safetensors")
    assert all(torch.equal(weight, hf[name]) for name, weight in saved[0]["weights"].items())
    # What is sent is what is saved, from the first rank alone; the other took part in each layer.
    first, other = ranks("lora_adapter")
    assert first["layers"] == other["layers"] == 2
    adapter = load_file(ranks.folder / "lora_hf" / "adapter" / "adapter_model.safetensors")
    assert first["adapter"].keys() == adapter.keys()
    assert all(torch.equal(tensor, adapter[name]) for name, tensor in first["adapter"].items())
    assert other["adapter"] == {}


@pytest.mark.bits
def test_resumed_adapters_on_two_ranks_are_exact(ranks, folders, adapters, start, sgd, weights_of):
    middle, straight, resumed = (ranks(name)[0]["weights"] for name in ("lora", "lora_straight", "lora_resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not all(torch.equal(straight[name], middle[name]) for name in straight)
    options = {"lora_adapter_path": str(adapters("qwen3"))}
    frozen_models = {"reference": folders("qwen3"), "other": ranks.folder / "hf"}
    backend = start(folders("qwen3"), options, sgd, frozen_models=frozen_models)
    backend.load(ranks.folder / "lora_checkpoint")
    assert all(torch.equal(weight, middle[name]) for name, weight in weights_of(backend).items())


@pytest.mark.parametrize("head", ["lm", "value"])
def test_float32_adapters_over_a_bfloat16_base(head, ranks):
    one, other = ranks(f"lora_half_{head}")
    np.testing.assert_array_equal(one["scores"], other["scores"])
    assert all(later < sooner for sooner, later in zip(one["losses"], one["losses"][1:], strict=False))
    original = load_file(ranks.folder / "half" / "model.safetensors")
    saved = load_file(ranks.folder / f"lora_half_{head}_hf" / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    for name, weight in original.items():
        assert torch.equal(saved[name], weight) == ("proj" not in name), name


def test_ranks_with_and_without_images_take_the_step_of_one(ranks, one_vision_step):
    report, before, expected, scores = one_vision_step(ranks.folder / "vision")
    for part, one in zip(ranks("vision"), scores, strict=True):
        np.testing.assert_allclose(part["log_probs"], one.log_probs, rtol=1e-5, atol=1e-5)
    assert_same_step(ranks("vision")[0]["weights"], (report, before, expected))
    # Half precision: near, and the tower is trained.
    half = ranks("vision_half")
    np.testing.assert_allclose(half[0]["log_probs"], scores[0].log_probs, atol=0.5)
    name = "model.visual.patch_embed.proj.weight"
    assert float((half[0]["weights"][name].float() - before[name]).abs().max()) > 0


def test_images_split_over_ranks_take_the_step_of_one(ranks, one_vision_step):
    report, before, expected, scores = one_vision_step(ranks.folder / "vision")
    parts = ranks("vision_cp")
    for number, one in enumerate(scores):
        joined = np.full(len(one.log_probs), np.nan, np.float32)
        for part in parts:
            joined[part[f"rows{number}"]] = part[f"log_probs{number}"]
        np.testing.assert_allclose(joined, one.log_probs, rtol=1e-5, atol=1e-5)
    assert_same_step(parts[0]["weights"], (report, before, expected))
    assert totals(parts) == pytest.approx(report.sums, rel=1e-5)


@pytest.mark.torchao
def test_a_step_in_float8_is_that_of_one_rank(ranks, start, folders, pack, samples, sequence_policy, sgd, weights_of):
    """In the same micro-batches: scales for the gradient of a weight are those of a micro-batch's tokens."""
    alone = start(folders("qwen3"), {"fp8_recipe": "rowwise"}, sgd)
    scores, before = alone.forward_only([pack(samples)])[0], weights_of(alone)
    report = alone.train_step([pack(part) for part in (samples[:3], samples[3:5], samples[5:])], sequence_policy())
    after = weights_of(alone)
    saved = ranks("float8")
    for part in saved:
        np.testing.assert_allclose(part["log_probs"], scores.log_probs, rtol=1e-5, atol=1e-5)
        assert part["grad_norm"] == pytest.approx(report.grad_norm, rel=1e-4)
    for name, tensor in after.items():
        apart = float((saved[0]["weights"][name] - tensor).norm())
        assert apart < 1e-3 * max(float((tensor - before[name]).norm()), 1e-3), name
