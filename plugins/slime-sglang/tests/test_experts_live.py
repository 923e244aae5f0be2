"""The real SGLang with a mixture of experts: its expert ids are those that transformers chooses."""

import asyncio

import numpy as np
import pytest
import torch
from engine_setup import setup_for
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.contracts.engine import Capability
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_plugin_kit.tiny_model import buckets_of, checksum_of, moved
from slime_sglang.plugin import Sglang
from slime_sglang.server.hook_table import UNPINNED_EXPERTS, in_source

pytestmark = [
    pytest.mark.sglang,
    # The one of CI does; see test_experts.py.
    pytest.mark.skipif(not in_source(UNPINNED_EXPERTS), reason="this SGLang keeps expert ids on GPUs alone"),
]

LAYERS, EXPERTS, TOP_K, VOCABULARY = 3, 8, 2, 25
CLEAR = 1e-3
"""Difference of probabilities; rounding may change the order of closer ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=640, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, moe_intermediate_size=16, norm_topk_prob=True, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(7)
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 if parameter.ndim > 1 else 1 + 0.1 * parameter)
    folder = tmp_path_factory.mktemp("model") / "moe"
    found.save_pretrained(folder)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def require_same_experts(model, tokens, ids, first=0):
    """`ids` (rows, L, K) of the tokens from `first` on, but those of a choice that is not clear."""
    seen = {}
    handles = [
        layer.mlp.gate.register_forward_hook(lambda gate, args, out, number=number: seen.update({number: out[0]}))
        for number, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens.tolist()]), use_cache=False)
    for handle in handles:
        handle.remove()
    assert sorted(seen) == list(range(LAYERS))
    compared = 0
    for number, logits in seen.items():
        ranked = logits.softmax(-1).sort(descending=True)
        clear = (ranked.values[:, TOP_K - 1] - ranked.values[:, TOP_K] > CLEAR).numpy()
        chosen = np.sort(ranked.indices[:, :TOP_K].numpy())
        rows = slice(first, first + len(ids))
        message = np.sort(ids[:, number])
        assert np.array_equal(message[clear[rows]], chosen[rows][clear[rows]]), f"layer {number}"
        compared += int(clear[rows].sum())
    return compared


def ask(number, tokens, start, budget=24):
    return GenerateRequest(
        request_id=f"{number}", token_ids=np.asarray(tokens, np.int32), seed=number, routed_experts_from=start,
        sampling=SamplingParams(max_new_tokens=budget, min_new_tokens=budget),
    )  # fmt: skip


async def test_ids_are_those_of_the_weights_that_chose(model, tmp_path):
    engine = Sglang.build(Sglang.Config(start_timeout=240))
    info = await engine.start(setup_for(model, tmp_path, routed_experts=True))
    try:
        assert Capability.ROUTED_EXPERTS in info.capabilities
        exact = load(model)
        rng = np.random.default_rng(3)
        requests = [ask(n, rng.integers(2, VOCABULARY, length), 0) for n, length in enumerate((1, 6, 11))]
        responses = await engine.generate(requests)
        compared = 0
        for request, response in zip(requests, responses, strict=True):
            tokens = np.concatenate([request.token_ids, response.token_ids])
            assert response.routed_experts.shape == (len(tokens) - 1, LAYERS, TOP_K)
            compared += require_same_experts(exact, tokens, response.routed_experts)
        assert compared > 100

        # A second turn returns only new ids.
        turn = np.concatenate([requests[1].token_ids, responses[1].token_ids, [4, 5]])
        known = len(responses[1].routed_experts)
        (response,) = await engine.generate([ask(9, turn, known, budget=4)])
        assert len(response.routed_experts) == len(turn) + 4 - 1 - known
        require_same_experts(exact, np.concatenate([turn, response.token_ids]), response.routed_experts, known)

        # Interrupted by a weight update: each part has the choices of its weights.
        running = asyncio.ensure_future(engine.generate([ask(20, turn[:5], 0, budget=400)]))
        await asyncio.sleep(1.0)
        await engine.pause()
        new = moved(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 5, scale=0.1)
        new.save_pretrained(tmp_path / "new")
        for bucket in buckets_of(folder_weights(tmp_path / "new"), 3, 2):
            await engine.load_bucket(bucket)
        await engine.resume()
        # Its weights have the names of the files, also the experts.
        assert await engine.checksum() == checksum_of(folder_weights(tmp_path / "new"))
        (response,) = await running
        assert response.finish_reason is FinishReason.LENGTH
        assert [span.version for span in response.spans] == [-1, 3]
        cut = response.spans[0].end
        tokens = np.concatenate([turn[:5], response.token_ids])
        assert len(response.routed_experts) == len(tokens) - 1
        require_same_experts(exact, tokens, response.routed_experts[: 5 + cut - 1])
        require_same_experts(load(tmp_path / "new"), tokens, response.routed_experts[5 + cut - 1 :], 5 + cut - 1)
    finally:
        await engine.stop()


def folder_weights(folder):
    """Weights by their names in files, where each expert has its own matrices."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
