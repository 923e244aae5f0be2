"""Seconds of a forward_backward of 64 x 256 tokens, for each line that it is sent."""

import sys
import time

import tinker
from tinker import types

service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(base_model=model, rank=8, seed=0).result()
data = []
for row in range(64):
    tokens = [60 + (row + 7 * n) % 90 for n in range(257)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 256}
    data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
for _ in sys.stdin:
    began = time.perf_counter()
    training.forward_backward(data, "cross_entropy").result()
    print("SECONDS", time.perf_counter() - began, flush=True)
    training.optim_step(types.AdamParams()).result()
