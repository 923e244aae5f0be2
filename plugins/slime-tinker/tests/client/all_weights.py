"""Training of all weights, step by step beside transformers and torch.optim in float64. all_weights.py HALF

It creates the file HALF in the middle, and prints what it computed as RESULT. Its model is unloaded at the end."""

import json
import sys
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
LR, STEPS = 3e-3, 6
TEXTS = [[60 + (5 * n + row) % 60 for n in range(20 + row)] for row in range(4)]


def datum(tokens):
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


class Oracle:
    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.new_optimizer()

    def new_optimizer(self):
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": ADAM["weight_decay"]},
            # slime-fsdp decays no vectors.
            {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=LR, betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"])

    def log_probs(self, tokens):
        logits = self.model(torch.tensor([tokens[:-1]])).logits[0]
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def step(self):
        """The loss before it, and the norm of the gradient."""
        loss = -sum(self.log_probs(tokens).sum() for tokens in TEXTS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), ADAM["grad_clip_norm"])
        self.adam.step()
        self.adam.zero_grad()
        return [loss.item(), norm.item()]


def step(training):
    # In two parts, whose gradients add up.
    parts = [training.forward_backward([datum(t) for t in own], "cross_entropy") for own in (TEXTS[:1], TEXTS[1:])]
    taken = training.optim_step(types.AdamParams(learning_rate=LR, **ADAM))
    return [sum(part.result().metrics["loss:sum"] for part in parts), taken.result().metrics["grad_norm"]]


def trainers(training):
    found = training.forward([datum(tokens) for tokens in TEXTS], "cross_entropy").result()
    return [np.array(output["logprobs"].data) for output in found.loss_fn_outputs]


def sampled(sampler):
    params = types.SamplingParams(max_tokens=8, seed=3)
    return sampler.sample(types.ModelInput.from_ints(TEXTS[0][:5]), 2, params).result().sequences


with tinker.ServiceClient() as service:
    name = service.get_server_capabilities().supported_models[0].model_name
    oracle = Oracle(Path.cwd() / name)
    training = service.create_lora_training_client(base_model=name).result()
    assert not training.get_info().is_lora
    base = service.create_sampling_client(base_model=name).result()
    at_first = [list(one.tokens) for one in sampled(base)]
    found, expected = [], []
    for number in range(STEPS):
        found.append(step(training))
        expected.append(oracle.step())
        if number == STEPS // 2:
            path = training.save_state("half").result().path
            Path(sys.argv[1]).touch()
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert found[-1][0] < 0.8 * found[0][0]

    # The sampler's log-probs are the trainer's; the base's and those of an older snapshot stay.
    sampler = training.save_weights_and_get_sampling_client().result()
    now = trainers(training)
    for tokens, own in zip(TEXTS, now, strict=True):
        np.testing.assert_allclose(own, oracle.log_probs(tokens).detach().numpy(), atol=1e-3)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        np.testing.assert_allclose(own, scored[1:], atol=1e-5)
    draws = [list(one.tokens) for one in sampled(sampler)]
    assert draws != at_first
    step(training)
    assert [list(one.tokens) for one in sampled(base)] == at_first
    assert [list(one.tokens) for one in sampled(sampler)] == draws

    # From the middle again: with the optimizer the same steps, to the bit; without it others.
    training.load_state_with_optimizer(path).result()
    assert [step(training) for _ in range(STEPS - STEPS // 2 - 1)] == found[STEPS // 2 + 1 :]
    for mine, then in zip(trainers(training), now, strict=True):
        np.testing.assert_array_equal(mine, then)
    training.load_state(path).result()
    without = [step(training) for _ in range(2)]
    assert without[0] == found[STEPS // 2 + 1]
    assert without[1] != found[STEPS // 2 + 2]

    def refusal(call):
        try:
            call()
        except tinker.TinkerError as error:
            return str(error)
        raise AssertionError("accepted")

    message = refusal(lambda: service.create_lora_training_client(base_model=name).result())
    assert "one model at a time" in message, message
    training.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
    assert "call optim_step first" in refusal(lambda: training.save_state("inside").result())
    print("RESULT", json.dumps([found, [list(map(float, own)) for own in now], draws]))
