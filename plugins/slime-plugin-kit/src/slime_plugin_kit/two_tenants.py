"""A program of two tenants of `slime serve`, by the Tinker SDK: python -m slime_plugin_kit.two_tenants ADDRESS KEY KEY UNEMBED

Each trains a model of its own; then both are sampled at once, and log-probs of what was sampled are those of the own trainer
and no other. Prints "done". The largest differences are printed first, in nats.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

CLOSE: Final = 1e-5
CLOSE_PROMPT: Final = 2e-5
"""Tokens of a prompt may be as unlikely as they like."""
STEPS: Final = 3
PROMPT: Final = [5, 6, 7, 8, 9, 10, 11]
TEXTS: Final = ([2 + 3 * n % 20 for n in range(24)], [3 + 5 * n % 20 for n in range(31)])
"""One for each tenant."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tenant:
    training: Any
    text: list[int]

    @classmethod
    def of(cls, address: str, key: str, number: int, *, unembed: bool) -> Tenant:
        import tinker

        service = tinker.ServiceClient(base_url=address, api_key=key)
        model = service.get_server_capabilities().supported_models[0].model_name
        assert model is not None
        training = service.create_lora_training_client(
            base_model=model, rank=4, seed=number, train_unembed=unembed
        ).result()
        return cls(training=training, text=TEXTS[number])

    def start_steps(self, count: int) -> list[Any]:
        from tinker import types

        adam = types.AdamParams(learning_rate=5e-3)
        data = [datum(self.text), datum(self.text[:9])]
        steps = [
            (self.training.forward_backward(data, "cross_entropy"), self.training.optim_step(adam))
            for _ in range(count)
        ]
        return [forward for forward, _ in steps]

    def log_probs(self, sequences: list[list[int]]) -> list[Any]:
        """Of all tokens but each one's first, under the trainers' weights."""
        found = self.training.forward([datum(tokens) for tokens in sequences], "cross_entropy").result()
        return [np.array(output["logprobs"].data) for output in found.loss_fn_outputs]


def datum(tokens: list[int]) -> Any:
    from tinker import types

    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def start_samples(sampler: Any) -> Any:
    from tinker import types

    params = types.SamplingParams(max_tokens=12, temperature=1.0)
    return sampler.sample(types.ModelInput.from_ints(PROMPT), 4, params)


def apart(tenant: Tenant, sampled: Any) -> float:
    """The largest difference of the sampler's log-probs from the tenant's trainer."""
    own = tenant.log_probs([PROMPT + list(one.tokens) for one in sampled.sequences])
    return max(
        float(np.abs(found[-len(one.tokens) :] - np.array(one.logprobs)).max())
        for found, one in zip(own, sampled.sequences, strict=True)
    )


def require_own_adapters(tenants: list[Tenant], samplers: list[Any]) -> None:
    running = [start_samples(sampler) for sampler in samplers]
    sampled = [one.result() for one in running]
    own = [apart(tenant, one) for tenant, one in zip(tenants, sampled, strict=True)]
    others = [apart(tenant, one) for tenant, one in zip(tenants, sampled[::-1], strict=True)]
    print("own", own, "others", others)
    assert max(own) < CLOSE, own
    assert min(others) > 1e-2, others


def run(address: str, keys: list[str], *, unembed: bool) -> None:
    from tinker import types

    tenants = [Tenant.of(address, key, number, unembed=unembed) for number, key in enumerate(keys)]
    # All requests of both before the first result.
    started = [tenant.start_steps(STEPS) for tenant in tenants]
    for steps in started:
        losses = [step.result().metrics["loss:sum"] for step in steps]
        assert losses[-1] < losses[0], losses
    samplers = [tenant.training.save_weights_and_get_sampling_client().result() for tenant in tenants]
    require_own_adapters(tenants, samplers)
    for tenant, sampler in zip(tenants, samplers, strict=True):
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tenant.text)).result()
        (own,) = tenant.log_probs([tenant.text])
        assert np.abs(own - np.array(scored[1:])).max() < CLOSE_PROMPT
    # A later snapshot beside the earlier one, of which the engine has both.
    first = tenants[0]
    before = first.log_probs([first.text])[0]
    first.start_steps(1)[0].result()
    newer = first.training.save_weights_and_get_sampling_client().result()
    require_own_adapters(tenants, [newer, samplers[1]])
    older = samplers[0].compute_logprobs(types.ModelInput.from_ints(first.text)).result()
    assert np.abs(before - np.array(older[1:])).max() < CLOSE_PROMPT
    print("done")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:4], unembed=sys.argv[4] == "True")
    sys.stdout.flush()
    # Without the interpreter's own end, which the SDK's threads abort now and then.
    os._exit(0)
