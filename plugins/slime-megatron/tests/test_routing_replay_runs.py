"""Whole runs of a mixture of experts, with an engine that returns the experts that it chose."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.data.table import read_groups

pytestmark = pytest.mark.megatron

LAYERS, EXPERTS, TOP_K = 2, 8, 2
ENGINE = '''
"""The embedded engine, which also returns what the routers of its model choose, or others. It keeps its weights:
transformers holds the experts of a layer together, and exports have them apart."""
from dataclasses import replace

import numpy as np
from pydantic import Field

from slime_core.contracts.engine import Capability
from slime_core.plugin import driver
from slime_local.plugin import Local

RECORDS = frozenset({Capability.ROUTED_EXPERTS})


class RecordingConfig(Local.Config):
    shift_from: int = Field(10**9, ge=0)
    """The first sample for which other experts are returned."""


@driver("slime.engines", "recording")
class Recording(Local):
    Config = RecordingConfig
    optional_capabilities = Local.optional_capabilities | RECORDS

    @classmethod
    def build(cls, config):
        import torch
        from slime_local.engine import LocalEngine

        class Engine(LocalEngine):
            async def start(self, setup):
                info = await super().start(setup)
                return replace(info, capabilities=info.capabilities | RECORDS)

            async def stream(self, requests):
                asked = {request.request_id: request for request in requests}
                async for response in super().stream(requests):
                    request = asked[response.request_id]
                    if request.routed_experts_from is None:
                        yield response
                        continue
                    tokens = np.concatenate([request.token_ids, response.token_ids])
                    index = int(request.request_id.split("/")[1])
                    ids = (self.chosen(tokens)[:-1] + (index >= config.shift_from)) % 8
                    yield replace(response, routed_experts=ids[request.routed_experts_from :].astype(np.uint8))

            async def load_bucket(self, bucket):
                if bucket.last:
                    self._version = bucket.version
                    self._decoder.activate(bucket.version)
                self._consider()

            @torch.inference_mode()
            def chosen(self, tokens):
                found = []
                gates = [layer.mlp.gate for layer in self._model.network.model.layers]
                hooks = [gate.register_forward_hook(lambda gate, args, out: found.append(out[2])) for gate in gates]
                self._model.log_probs(tokens, 1)
                for hook in hooks:
                    hook.remove()
                return torch.stack(found, 1).numpy()

        return Engine(config)
'''


@pytest.fixture(scope="module")
def project(make_project, tmp_path_factory):
    made = make_project(tmp_path_factory.mktemp("project"))
    base = made.folder / "base"
    dense = json.loads((base / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id",
             "pad_token_id", "max_position_embeddings")  # fmt: skip
    config = AutoConfig.for_model(
        "qwen3_moe", **{name: dense[name] for name in names if name in dense}, num_hidden_layers=LAYERS,
        intermediate_size=48, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=16,
        norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 if parameter.ndim > 1 else parameter)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base)
    (made.folder / "engine.py").write_text(ENGINE)
    return made


def differences(project, run):
    return [step["train/train_rollout_logprob_abs_diff"] for step in project.metrics(run, "train/step")]


RECORDING = ("--plugin", "reward.py", "engine.py", "--engine", "recording", "--num-rollout", "1")


def test_the_engines_choice_reaches_the_trainer(project):
    project.run(
        *RECORDING,
        "--name",
        "rollout",
        "--use-rollout-routing-replay",
        "--recording-shift-from",
        "32",
        "--dump-rollouts",
    )
    # Two optimizer steps: in the first the trainer's log-probs are the engine's. For the second's samples the engine returns
    # experts that it did not use, with which the trainer is another model.
    first, second = differences(project, "rollout")
    assert first < 1e-4
    assert second > 0.1
    (path,) = (project.folder / "runs" / "rollout" / "rollouts").glob("*.parquet")
    samples = [sample for group in read_groups(path) for sample in group.samples]
    assert len(samples) == 64
    for sample in samples:
        assert sample.routed_experts.shape == (len(sample.tokens) - 1, LAYERS, TOP_K)
        assert sample.routed_experts.dtype == np.uint8


def test_the_trainers_own_choice_is_recorded_and_replayed(project):
    """One optimizer step, for which only the replay requires old log-probs."""
    project.run(*RECORDING, "--name", "recorded", "--use-routing-replay", "--num-steps-per-rollout", "1")
    (gap,) = differences(project, "recorded")
    assert gap < 1e-4
    (step,) = project.metrics("recorded", "train/step")
    assert step["train/grad_norm"] > 1e-3
