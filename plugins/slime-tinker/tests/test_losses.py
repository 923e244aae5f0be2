"""Losses by name against the documented formulas in float64: value and gradient."""

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, ForwardBackwardRequest, ModelInput, TensorData
from tinker.types.forward_backward_input import ForwardBackwardInput

from slime_core.registry import Registry
from slime_tinker.errors import RequestError
from slime_tinker.loss_calls import table_of
from slime_tinker.loss_sum import loss_of
from slime_tinker.training import trained_outcome
from slime_tinker.training_data import training_data

LENGTHS = (5, 1, 9)
CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
}


def documented(name, log_probs, inputs, config):
    """One datum's loss, by the formulas of the documentation."""
    if name == "cross_entropy":
        return (-log_probs * inputs["weights"]).sum()
    old, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(log_probs - old)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "dro":
        return -(log_probs * advantages - 0.5 * config["beta"] * (log_probs - old) ** 2).sum()
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * log_probs * advantages).sum()
    if name == "gspo":
        marked = inputs["sequence_ratio_mask"] != 0
        mean = (log_probs.detach() - old)[marked].mean()
        ratio = torch.exp(mean + log_probs - log_probs.detach())
    return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()


def case(name):
    """Three datums whose targets are the next tokens, and log-probs near those that sampled."""
    rng = np.random.default_rng(0)
    datums, log_probs = [], []
    for length in LENGTHS:
        tokens = rng.integers(1, 50, length + 1)
        old = rng.normal(-1.0, 0.2, length).astype(np.float32)
        inputs = {"target_tokens": tokens[1:].astype(np.int64)}
        if name == "cross_entropy":
            inputs["weights"] = rng.normal(0.0, 1.0, length).astype(np.float32)
        else:
            inputs |= {"logprobs": old, "advantages": rng.normal(0.0, 1.0, length).astype(np.float32)}
        if name == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(length, np.float32)
            if length > 1:
                inputs["sequence_ratio_mask"][0] = inputs["advantages"][0] = 0.0
        datums.append(Datum(model_input=ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
        log_probs.append((old + rng.normal(0.0, 0.15, length)).astype(np.float32))
    return datums, log_probs


def parsed(datums, name, config, **limits):
    given = ForwardBackwardInput(data=datums, loss_fn=name, loss_fn_config=config or None)
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=1)
    )
    request = pb.ForwardBackwardRequest.FromString(message.SerializeToString())
    return training_data(request, **{"vocab_size": 50, "max_length": 64, **limits})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loss_is_the_documented_one(name):
    datums, log_probs = case(name)
    data = parsed(datums, name, CONFIGS[name])
    found = loss_of(Registry.from_environment(), data.parts[0].loss, data.datums, np.concatenate(log_probs))
    start = 0
    for own, datum, length in zip(log_probs, datums, LENGTHS, strict=True):
        inputs = {key: torch.from_numpy(np.array(value.data)).double() for key, value in datum.loss_fn_inputs.items()}
        expected = documented(name, torch.from_numpy(own).double(), inputs, CONFIGS[name])
        assert found[start : start + length].sum() == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
        start += length


@pytest.mark.parametrize("name", CONFIGS)
def test_its_gradient_is_the_documented_one(name):
    """The plugin's own, on one datum at a time, in float64."""
    from slime_core import groups
    from slime_core.config.part import BoundPlugin
    from slime_core.contracts.loss import LossInputs
    from slime_tinker.loss_sum import WholeSamples, tensor

    datums, log_probs = case(name)
    data = parsed(datums, name, CONFIGS[name])
    options = dict(data.parts[0].loss)
    registry = Registry.from_environment()
    part = BoundPlugin.of(
        registry.resolve(groups.LOSSES, options.pop("name"), where="x"), data.parts[0].loss["name"], options, where="x"
    )
    for datum, sent, own in zip(data.datums, datums, log_probs, strict=True):
        inputs = {key: torch.from_numpy(np.array(value.data)).double() for key, value in sent.loss_fn_inputs.items()}
        leaf = torch.from_numpy(own).double().requires_grad_()
        documented(name, leaf, inputs, CONFIGS[name]).backward()
        ours = torch.from_numpy(own).double().requires_grad_()
        mask = torch.from_numpy(np.asarray(datum.mask, np.bool_))
        given = LossInputs(
            mask=mask,
            log_probs=ours,
            old_log_probs=None if datum.log_probs is None else tensor(datum.log_probs),
            advantages=tensor(np.broadcast_to(np.float32(datum.advantages), mask.shape).copy()),
        )
        samples = WholeSamples(torch.zeros(len(own), dtype=torch.int64), 1)
        values = part.build()(given, samples).values
        (values * torch.from_numpy(datum.loss_weights).double()).sum().backward()
        torch.testing.assert_close(ours.grad, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_of_each_token(name):
    """Some datums have their own; the others have those of the request."""
    datums, log_probs = case(name)
    expected, rng = 0.0, np.random.default_rng(1)
    for number, (datum, own) in enumerate(zip(datums, log_probs, strict=True)):
        inputs = {key: torch.from_numpy(np.array(value.data)).double() for key, value in datum.loss_fn_inputs.items()}
        config = dict(CONFIGS[name])
        if number != 1:
            for key, choices in (("clip_low_threshold", (0.9, 0.97)), ("clip_high_threshold", (1.01, 1.2))):
                chosen = rng.choice(choices, len(own)).astype(np.float32)
                datum.loss_fn_inputs[key] = TensorData.from_numpy(chosen)
                config[key] = torch.from_numpy(chosen.astype(np.float64).round(6))
        expected += float(documented(name, torch.from_numpy(own).double(), inputs, config))
    data = parsed(datums, name, CONFIGS[name])
    assert 3 < len(data.parts) < 6
    outcome = trained_outcome(Registry.from_environment(), data, np.concatenate(log_probs))
    found = pb.ForwardBackwardOutput.FromString(outcome.content)
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("stable_reinforce", {}, "not public"),
        ("custom", {}, "forward_backward_custom"),
        ("mine", {}, "There are cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ("ppo", {"clip": 0.2}, 'loss_fn_config["clip"]: not an option of ppo'),
        ("cross_entropy", {"kl_coeff": 0.1}, "It has no options"),
        ("ppo", {"clip_low_threshold": 1.1}, "must be below 1"),
        ("ppo", {"clip_low_threshold": "low"}, "must be a finite number"),
        ("dro", {"beta": -1.0}, "0 or above"),
    ],
)
def test_a_call_that_no_loss_takes_is_refused(name, config, message):
    with pytest.raises(RequestError) as error:
        table_of(name, config)
    assert message in str(error.value)
