"""The SDK's calls, with what each has to give. Needs a server with a fresh state. Prints "done"."""

import numpy as np
import tinker
import torch
from tinker import types

service = tinker.ServiceClient()
MODEL = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
info = training.get_info()
assert info.model_data.model_name == MODEL
assert info.is_lora
tokenizer = training.get_tokenizer()
ids = tokenizer.encode("hello world, hello tinker")


def datum(tokens, **inputs):
    given = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def adam(lr):
    return types.AdamParams(learning_rate=lr)


def loss_of(client):
    return client.forward(data, "cross_entropy").result().metrics["loss:sum"]


# Supervised, submitted before the results of earlier calls are there.
data = [datum(ids, weights=[1.0] * (len(ids) - 1)), datum(ids[:9], weights=[0.0] * 4 + [1.0] * 4)]
pairs = [(training.forward_backward(data, "cross_entropy"), training.optim_step(adam(1e-2))) for _ in range(12)]
losses = [forward.result().metrics["loss:sum"] for forward, _ in pairs]
assert losses[-1] < 0.6 * losses[0], losses
assert pairs[-1][1].result().metrics["step"] == 12
outputs = pairs[0][0].result().loss_fn_outputs
by_hand = -np.dot(outputs[1]["logprobs"].data, [0.0] * 4 + [1.0] * 4) - np.sum(outputs[0]["logprobs"].data)
assert abs(by_hand - losses[0]) < 1e-4

# Sampling: log-probs of the sampler are the trainer's.
sampler = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(ids[:6])
params = types.SamplingParams(max_tokens=12, temperature=1.0, stop=[258])
options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
sampled = sampler.sample(prompt, 4, params, **options).result()
assert len({tuple(sequence.tokens) for sequence in sampled.sequences}) == 4
assert sampled.prompt_logprobs[0] is None
for own, top in zip(sampled.prompt_logprobs[1:], sampled.topk_prompt_logprobs[1:], strict=True):
    assert len(top) == 3
    assert top[0][1] >= top[1][1] >= top[2][1]
    assert own <= top[0][1] + 1e-6

agreed = 0
for sequence in sampled.sequences:
    for token, own, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert len(top) == 2
        assert top[0][1] >= max(top[1][1], own - 1e-5)
        agreed += any(other == token and abs(value - own) < 1e-5 for other, value in top)
assert agreed > 4


def policy(sequence, advantage):
    tokens = ids[:6] + list(sequence.tokens)
    given = len(tokens) - 1 - len(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            # As rl_loop does: no target in the prompt.
            "target_tokens": [0] * given + list(sequence.tokens),
            "logprobs": [0.0] * given + list(sequence.logprobs),
            "advantages": [0.0] * given + [advantage] * len(sequence.tokens),
        },
    )


rollouts = [
    policy(sequence, weight) for sequence, weight in zip(sampled.sequences, (1.0, -1.0, 0.5, -0.5), strict=True)
]
scored = training.forward(rollouts, "importance_sampling").result()
for output, sequence in zip(scored.loss_fn_outputs, sampled.sequences, strict=True):
    own = np.array(output["logprobs"].data)[-len(sequence.tokens) :]
    assert np.abs(own - np.array(sequence.logprobs)).max() < 1e-5
again = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8, seed=7)).result()
same = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8, seed=7)).result()
assert [s.tokens for s in again.sequences] == [s.tokens for s in same.sequences]
full = types.ModelInput.from_ints(ids)
targets = training.forward([datum(ids, weights=[1.0] * (len(ids) - 1))], "cross_entropy").result()
trainers = np.array(targets.loss_fn_outputs[0]["logprobs"].data)
assert np.abs(trainers - np.array(sampler.compute_logprobs(full).result()[1:])).max() < 1e-5
stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=64, stop="l")).result().sequences[0]
assert stopped.stop_reason == "length" or "l" in tokenizer.decode(stopped.tokens[-1:])

# The losses, and one that runs in the client.
for name, config in (
    ("importance_sampling", None),
    ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
):
    found = training.forward_backward(rollouts, name, config).result()
    assert np.isfinite(found.metrics["loss:sum"])
    training.optim_step(adam(1e-3)).result()


def squares(data, log_probs):
    loss = torch.stack([0.01 * own.pow(2).sum() - 0.1 * own.sum() for own in log_probs]).sum()
    return loss, {"own": loss.item()}


assert "own" in training.forward_backward_custom(data, squares).result().metrics
training.optim_step(adam(1e-3)).result()

# Several targets at a position: what two requests with one each have, and the loss that is documented.
chosen = np.array([ids[1:], [3 + n % 7 for n in range(len(ids) - 1)]]).T
shares = np.linspace(-1, 1, chosen.size, dtype=np.float32).reshape(chosen.shape)


def several(targets, weights):
    inputs = {
        name: types.TensorData.from_numpy(values) for name, values in (("target_tokens", targets), ("weights", weights))
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


wide = training.forward([several(chosen, shares), datum(ids[:4])], "cross_entropy").result()
found = wide.loss_fn_outputs[0]["logprobs"].to_numpy()
assert found.shape == chosen.shape
for column in range(2):
    one = training.forward([several(chosen[:, column], shares[:, column])], "cross_entropy").result()
    assert np.abs(np.array(one.loss_fn_outputs[0]["logprobs"].data) - found[:, column]).max() < 1e-5
short = np.array(wide.loss_fn_outputs[1]["logprobs"].data)
assert abs(wide.metrics["loss:sum"] + (shares * found).sum() + short.sum()) < 1e-4
losses = []
for _ in range(6):
    step = training.forward_backward([several(chosen, np.full(chosen.shape, 0.5, np.float32))], "cross_entropy")
    training.optim_step(adam(3e-3)).result()
    losses.append(step.result().metrics["loss:sum"])
assert losses[-1] < 0.9 * losses[0], losses

# State, with and without the optimizer.
path = training.save_state("first").result().path
before = loss_of(training)
step = (training.forward_backward(data, "cross_entropy"), training.optim_step(adam(1e-2)))
step[1].result()
after = loss_of(training)
assert after != before
restored = service.create_training_client_from_state_with_optimizer(path).result()
assert loss_of(restored) == before
restored.forward_backward(data, "cross_entropy")
restored.optim_step(adam(1e-2)).result()
assert loss_of(restored) == after
plain = service.create_training_client_from_state(path).result()
assert loss_of(plain) == before
plain.forward_backward(data, "cross_entropy")
plain.optim_step(adam(1e-2)).result()
assert loss_of(plain) != after

# Named weights for sampling, listing, deletion.
named = training.save_weights_for_sampler("first").result().path
of_name = service.create_sampling_client(model_path=named).result()
assert len(of_name.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result().sequences[0].tokens) == 3
rest = service.create_rest_client()
listed = {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints}
assert listed == {path, named}, listed
assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
rest.set_checkpoint_ttl_from_tinker_path(named, 7200).result()
expiring = rest.list_checkpoints(training.model_id).result().checkpoints
assert any(checkpoint.expires_at is not None for checkpoint in expiring)
rest.delete_checkpoint_from_tinker_path(named).result()
assert len(rest.list_user_checkpoints().result().checkpoints) == 1

# Data in several chunks, of which the first arrives last.
many = training.forward(
    [datum(ids[: 3 + n % 5], weights=[1.0] * (2 + n % 5)) for n in range(1500)], "cross_entropy"
).result()
lengths = [len(output["logprobs"].data) for output in many.loss_fn_outputs]
assert lengths == [2 + n % 5 for n in range(1500)]


def refusal(call):
    try:
        call()
    except tinker.TinkerError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("accepted")


# Errors name what is wrong, and the model continues.
for name, word in (("stable_reinforce", "not public"), ("nope", "unknown"), ("custom", "in the client")):
    assert word in refusal(lambda name=name: training.forward_backward(data, name).result())
outside = [datum([3, 100_000, 4], weights=[1.0, 1.0])]
assert "data[0].model_input[1] = 100000" in refusal(
    lambda: training.forward_backward(outside, "cross_entropy").result()
)
message = refusal(lambda: training.forward_backward(rollouts, "gspo").result())
assert "RequestFailedError" in message
assert "sequence_ratio_mask" in message
assert "adam_params.beta1" in refusal(lambda: training.optim_step(types.AdamParams(beta1=1.5)).result())
assert "NotFoundError" in refusal(lambda: service.create_sampling_client(model_path=named).result())
assert "BadRequestError" in refusal(lambda: service.create_lora_training_client(base_model="other/model").result())
assert loss_of(training) == after
print("done")
