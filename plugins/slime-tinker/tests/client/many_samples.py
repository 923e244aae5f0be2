"""A thousand requests at once. Prints how many tokens came."""

import tinker
from tinker import types

service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
sampler = service.create_sampling_client(base_model=model).result()
prompt, params = types.ModelInput.from_ints([70, 71, 72]), types.SamplingParams(max_tokens=4)
futures = [sampler.sample(prompt, 1, params) for _ in range(1000)]
found = [future.result().sequences[0] for future in futures]
assert len({sequence.sequence_id for sequence in found}) == 1000
print("tokens", sum(len(sequence.tokens) for sequence in found))
