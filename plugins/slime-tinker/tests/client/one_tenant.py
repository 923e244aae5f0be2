"""Trains and samples a little, and prints everything that came as JSON. one_tenant.py SEED"""

import json
import sys

import tinker
from tinker import types

service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(base_model=model, rank=4, seed=int(sys.argv[1])).result()
tokens = [60 + (3 * n + int(sys.argv[1])) % 40 for n in range(48)]
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 47},
)
results = []
for _ in range(4):
    forward, step = training.forward_backward([datum] * 4, "cross_entropy"), training.optim_step(types.AdamParams())
    results.append([forward.result().metrics["loss:sum"], step.result().metrics["grad_norm"]])
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens[:5])
    sampled = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=6)).result()
    results.append([[list(map(int, one.tokens)), list(map(float, one.logprobs))] for one in sampled.sequences])
print("RESULT", json.dumps(results))
