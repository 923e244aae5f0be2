"""Batch-invariant kernels: the same bits at every position of a row or a sequence; and which runs may use them."""

import pytest
import torch

from slime_core.controller.learner import LearnerPlan
from slime_core.errors import ConfigError, ModelError
from slime_training.batch_invariant.attention import attend
from slime_training.batch_invariant.mode import InvariantKernels
from slime_training.batch_invariant.products import BLOCK, multiply, require_equal_rows
from slime_training.batch_invariant.sums import blocked_sum, log_softmax, log_sum_exp, sum_of_last


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def same_bits(one, other):
    return equal(one.detach().numpy(), other.detach().numpy())


@pytest.mark.bits
@pytest.mark.parametrize("count", [1, 2, 7, 33, 100])
def test_sums(count):
    x = random(5, count, scale=100)
    exact = x.double()
    assert torch.allclose(sum_of_last(x).double(), exact.sum(-1), rtol=1e-6, atol=1e-4)
    assert torch.allclose(blocked_sum(x.T).double(), exact.sum(-1), rtol=1e-6, atol=1e-4)
    padded = torch.cat([x.T, torch.zeros(70, 5)])
    assert same_bits(blocked_sum(padded), blocked_sum(x.T))
    assert torch.allclose(log_sum_exp(x).double(), exact.logsumexp(-1), rtol=1e-6)
    assert same_bits(log_softmax(x)[1:3], log_softmax(x[1:3]))


@pytest.mark.bits
@pytest.mark.parametrize(("inner", "outer"), [(17, 5), (32, 48), (96, 25)])
def test_a_row_of_a_product_does_not_depend_on_the_others(inner, outer):
    x, weight = random(70, inner), random(outer, inner, seed=1)
    product = multiply(x, weight.t())
    assert torch.allclose(product.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
    for row in (0, BLOCK - 1, BLOCK, 69):
        assert same_bits(multiply(x[row : row + 1], weight.t()), product[row : row + 1])
    assert multiply(x[:0], weight.t()).shape == (0, outer)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert same_bits(multiply(x, weight.t()), product)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_products_that_depend_on_the_place_of_a_row_are_noticed(monkeypatch):
    require_equal_rows([(48, 32)], torch.float32)
    plain = torch.mm

    def uneven(left, right, *, out):
        plain(left, right, out=out)
        out[BLOCK // 2] += 1e-6

    monkeypatch.setattr(torch, "mm", uneven)
    with pytest.raises(ModelError, match="48 x 32 in float32 depend on the position of a row"):
        require_equal_rows([(48, 32)], torch.float32)


@pytest.mark.bits
@pytest.mark.parametrize("window", [None, 6])
def test_attention(window):
    """Against the formula in float64, gradients included; and a sequence alone, with other padding, one query at a time."""
    lengths = (5, 40, 70)
    q, k, v = random(3, 4, 70, 8), random(3, 2, 70, 8, seed=1), random(3, 2, 70, 6, seed=2)
    last_key = torch.arange(70).expand(3, -1)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, last_key, 0.3, window)

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    distance = torch.arange(70)[:, None] - torch.arange(70)
    seen = (distance >= 0) & (distance < (window or 70))
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).transpose(2, 3) * 0.3
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide[2].repeat_interleave(2, 1)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)
    weight = random(3, 4, 70, 6, seed=3)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for got, exact in zip(inputs, wide, strict=True):
        assert torch.allclose(got.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)

    for n, length in enumerate(lengths):
        alone = attend(q[n : n + 1, :, :length], k[n : n + 1, :, :length], v[n : n + 1, :, :length],
                       last_key[:1, :length], 0.3, window)  # fmt: skip
        assert same_bits(alone[0], out[n, :, :length])
        last = slice(length - 1, length)
        one = attend(q[n : n + 1, :, last], k[n : n + 1], v[n : n + 1], last_key[:1, last], 0.3, window)
        assert same_bits(one[0], out[n, :, last])


@pytest.mark.bits
@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid"])
def test_activations_do_not_depend_on_the_position_of_an_element(name):
    function = getattr(torch.nn.functional, name)
    x = random(1003, scale=3)
    with InvariantKernels():
        whole = function(x)
        assert all(
            same_bits(function(x[start:end].clone()), whole[start:end]) for start, end in [(0, 1), (5, 22), (990, 1003)]
        )
    assert torch.allclose(whole, function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.bits
def test_layer_norm():
    x, weight, bias = (random(*shape, seed=n).requires_grad_() for n, shape in enumerate([(70, 33), (33,), (33,)]))
    with InvariantKernels():
        whole = torch.nn.functional.layer_norm(x, (33,), weight, bias)
        alone = torch.nn.functional.layer_norm(x[69:], (33,), weight, bias)
    assert same_bits(alone[0], whole[69])
    whole.square().sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(wide[0], (33,), *wide[1:])
    expected.square().sum().backward()
    assert torch.allclose(whole.double(), expected, atol=1e-5)
    for got, exact in zip((x, weight, bias), wide, strict=True):
        assert torch.allclose(got.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_an_operation_without_a_kernel_is_refused_by_name():
    x = random(3, 4)
    with InvariantKernels(), pytest.raises(ModelError, match=r"the model computes aten\.cumsum\.default"):
        x.cumsum(0)
    with InvariantKernels(), pytest.raises(ModelError, match="only the last is computed"):
        x.sum(0)


ABLE = '''
from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.plugin import driver


class Nothing(DriverConfig):
    """No options."""


@driver("slime.backends", "able")
class Able(BackendDriver):
    Config = Nothing

    @classmethod
    def build(cls, config):
        raise AssertionError

    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout()

    @classmethod
    def true_on_policy_problems(cls, config):
        return []


@driver("slime.engines", "able")
class AbleEngine(EngineDriver):
    Config = Nothing
    transports = ("carrier",)
    optional_capabilities = frozenset({Capability.TRUE_ON_POLICY})

    @classmethod
    def build(cls, config):
        raise AssertionError
'''


@pytest.fixture
def able(bound, tmp_path):
    (tmp_path / "able.py").write_text(ABLE)
    plugins = ("--plugin", str(tmp_path / "fakes.py"), str(tmp_path / "able.py"))
    return lambda *flags: bound(*plugins, "--backend", "able", "--engine", "able", "--true-on-policy-mode", *flags)


def test_engine_and_backend_must_be_able_to(bound):
    with pytest.raises(ConfigError) as refused:
        bound("--true-on-policy-mode")
    assert [problem.partition(":")[0] for problem in refused.value.problems] == ["algo.true_on_policy_mode = true"] * 2
    assert 'engine "fake"' in str(refused.value)
    assert 'backend "fake"' in str(refused.value)


@pytest.mark.parametrize(
    "flags", [("--max-async-level", "1"), ("--update-weights-interval", "2"), ("--corrections", "tis")]
)
def test_settings_that_are_off_policy_or_without_effect_are_refused(able, flags):
    with pytest.raises(ConfigError, match=r"algo\.true_on_policy_mode = true"):
        able(*flags)


def test_no_forward_is_spent_on_old_log_probs(able):
    """One optimizer step: they are the current ones. More: they are the engine's."""
    one, two = able(), able("--num-steps-per-rollout", "2", "--set", "train.global_batch_size=16")
    assert [LearnerPlan.of(run).old_from_rollout for run in (one, two)] == [False, True]
    assert [run.roles[0].plan.scoring for run in (one, two)] == [(), ()]
    assert one.roles[0].terms.old_from_current
