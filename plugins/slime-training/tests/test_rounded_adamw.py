"""AdamW over rounded weights and moments, against float64 and against rounding to the nearest."""

import copy

import numpy as np
import pytest
import torch

from slime_training.rounded_adamw import StochasticRoundingAdamW

F32, BF16 = torch.float32, torch.bfloat16


def make(weights, *, lr=1e-2, beta2=0.98, decay=0.0, mean=F32, square=F32):
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = StochasticRoundingAdamW(
        parameters,
        lr=lr,
        betas=(0.9, beta2),
        eps=1e-8,
        weight_decay=decay,
        exp_avg_dtype=mean,
        exp_avg_sq_dtype=square,
    )
    return parameters, optimizer


def take_steps(parameters, optimizer, gradients):
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def oracle(weight, gradients, *, lr=1e-2, beta2=0.98, decay=0.0):
    w, m, v = weight.double().numpy().copy(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double().numpy()
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        w = w * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)
    return w


@pytest.mark.parametrize(
    ("weights", "mean", "square", "tolerance"),
    [(F32, F32, F32, 2e-6), (F32, BF16, BF16, 1.5e-3), (BF16, BF16, BF16, 0.02)],
)
def test_steps_equal_adamw(weights, mean, square, tolerance):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw).to(weights) for shape in ((30, 7), (5,), (0, 3))]
    gradients = [[torch.randn(w.shape, generator=draw).to(weights) for w in start] for _ in range(12)]
    parameters, optimizer = make([w.clone() for w in start], decay=0.3, mean=mean, square=square)
    take_steps(parameters, optimizer, gradients)
    for number, parameter in enumerate(parameters):
        expected = oracle(start[number], [of_step[number] for of_step in gradients], decay=0.3)
        assert parameter.dtype == weights
        np.testing.assert_allclose(parameter.detach().double().numpy(), expected, atol=tolerance, rtol=tolerance)
    # The empty one counts too.
    for state in (optimizer.state[parameter] for parameter in parameters):
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, float(state["step"])) == (mean, square, 12.0)


def test_steps_too_small_for_bfloat16_add_up():
    """lr 1e-6 on weights of 0.02, whose neighbours are 1.2e-4 away: 300 steps are 3e-4."""
    start, gradients = torch.full((4000,), 0.02, dtype=BF16), [[torch.linspace(0.1, 1, 4000)]] * 300
    (weight,), optimizer = make([start.clone()], lr=1e-6, mean=BF16, square=BF16)
    take_steps([weight], optimizer, gradients)
    moved = weight.detach().double() - start.double()
    # Each of 4,000 is off by 1e-4 or so, their mean by 63 times less.
    assert float(moved.mean()) == pytest.approx(-3e-4, rel=0.03)
    assert 1e-5 < float(moved.std()) < 3e-4

    nearest = torch.nn.Parameter(start.clone())
    plain = torch.optim.AdamW([nearest], lr=1e-6, betas=(0.9, 0.98), weight_decay=0.0)
    take_steps([nearest], plain, gradients)
    assert torch.equal(nearest.detach(), start)


def test_a_second_moment_that_decays_slowly_decays():
    """beta2 = 0.999: a step takes 0.1% off, half of what bfloat16 resolves."""
    gradients = [[torch.linspace(0.9, 1.1, 4000)]] + [[torch.linspace(1e-9, 1e-8, 4000)]] * 400
    (weight,), optimizer = make([torch.ones(4000)], beta2=0.999, square=BF16)
    take_steps([weight], optimizer, gradients)
    kept = optimizer.state[weight]["exp_avg_sq"]
    assert float(kept.double().mean()) == pytest.approx(0.001 * (1 + 0.1**2 / 3) * 0.999**400, rel=0.01)
    nearest = torch.tensor(0.001).bfloat16()
    assert (0.999 * nearest.float()).bfloat16() == nearest


@pytest.mark.bits
def test_how_a_value_is_rounded_depends_on_it_and_the_step_alone():
    """It does not depend on the tensor or shard of the value: replicas stay equal."""
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(1000, generator=draw).bfloat16()
    gradients = [torch.randn(1000, generator=draw) for _ in range(5)]
    (whole,), optimizer = make([start.clone()], mean=BF16, square=BF16)
    take_steps([whole], optimizer, [[g] for g in gradients])
    parts, cut = make([start[600:].clone(), start[:600].clone()], mean=BF16, square=BF16)
    take_steps(parts, cut, [[g[600:], g[:600]] for g in gradients])
    assert torch.equal(whole[600:], parts[0])
    assert torch.equal(whole[:600], parts[1])


@pytest.mark.bits
@pytest.mark.parametrize(("weights", "moments"), [(F32, BF16), (BF16, F32), (BF16, BF16)])
def test_a_loaded_state_keeps_its_dtypes_and_its_bits(weights, moments):
    """Two groups, of which only the second is trained: states are found by their indices."""
    draw = torch.Generator().manual_seed(2)
    gradients = [[torch.randn(50, generator=draw)] for _ in range(6)]

    def begun(start):
        parameters, optimizer = make([torch.zeros(3, dtype=weights)], mean=moments, square=moments)
        parameters.append(torch.nn.Parameter(start.clone()))
        optimizer.add_param_group({"params": parameters[1:]})
        return parameters[1], optimizer

    straight, one = begun(torch.zeros(50, dtype=weights))
    take_steps([straight], one, gradients[:3])
    resumed, other = begun(straight.detach())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        assert other.state[resumed][name].dtype == moments
        assert torch.equal(other.state[resumed][name], one.state[straight][name])
    assert set(other.state) == {resumed}
    take_steps([straight], one, gradients[3:])
    take_steps([resumed], other, gradients[3:])
    assert torch.equal(straight, resumed)
