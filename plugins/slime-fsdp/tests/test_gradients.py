"""Loss and gradients against a float64 oracle. With plain SGD at learning rate 1 the gradient is the change of the weights."""

import pytest
import torch


@pytest.fixture
def step(start, weights_of, sgd, folders, sequence_policy):
    def take(family, micros, options=None, **objective):
        backend = start(folders(family), options, sgd)
        before = weights_of(backend)
        report = backend.train_step(micros, sequence_policy(**objective))
        after = weights_of(backend)
        return report, {name: before[name].double() - after[name].double() for name in before}

    return take


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_gradients_equal_float64_transformers(family, step, pack, samples, oracle):
    report, found = step(family, [pack(samples)])
    expected = oracle(family)
    exact = expected.gradients(samples)
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert gradient.norm() > 1e-4
        assert (found[name] - gradient).norm() < 2e-4 * gradient.norm(), name
    norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert report.sums["loss"] == pytest.approx(expected.loss(samples).item(), rel=1e-5)
    assert not report.skipped


def assert_same(found, exact):
    scale = max(float(gradient.norm()) for gradient in exact.values())
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 1e-5 * scale, name


@pytest.mark.parametrize(
    "cut",
    [
        lambda s: [s[::-1]],
        lambda s: [[sample] for sample in s],
        lambda s: [s[4:], s[1:4], s[:1]],
        lambda s: [s[:3], [], s[3:]],
        lambda s: [s[1:3], s[:1] + s[3:]],
    ],
    ids=["reversed", "one each", "three", "with an empty one", "one without loss"],
)
def test_gradients_do_not_depend_on_packing(cut, step, pack, samples):
    whole, exact = step("qwen3", [pack(samples)])
    parts, found = step("qwen3", [pack(part) for part in cut(samples)])
    assert_same(found, exact)
    assert parts.sums == pytest.approx(whole.sums, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_linear_attention_keeps_sequences_apart(family, step, pack, samples):
    _, exact = step(family, [pack([sample]) for sample in samples])
    assert all(gradient.norm() > 1e-5 for name, gradient in exact.items() if "linear_attn" in name)
    _, found = step(family, [pack(samples[::-1])], {"gradient_checkpointing": True})
    assert_same(found, exact)


@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, {"log_probs_chunk_size": 2}, {"attn_implementation": "eager"}]
)
def test_options_do_not_change_gradients(options, step, pack, samples):
    _, exact = step("qwen3", [pack(samples)])
    _, found = step("qwen3", [pack(samples)], options)
    assert_same(found, exact)


def test_entropy_as_a_metric_equals_entropy_with_gradient(step, pack, samples):
    metric, without = step("qwen3", [pack(samples)], entropy_has_gradient=False)
    active, given = step("qwen3", [pack(samples)])
    assert metric.sums["entropy"] == pytest.approx(active.sums["entropy"], rel=1e-6)
    assert any((without[name] - given[name]).norm() > 1e-4 for name in given)


def test_micro_batches_without_trained_tokens_change_nothing(step, pack, samples):
    report, found = step("qwen3", [pack([samples[2]]), pack([])])
    assert all(not gradient.any() for gradient in found.values())
    assert report.grad_norm == 0.0
    assert not report.skipped
