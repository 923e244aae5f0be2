"""Expert ids: requests for them, checks of responses, and their concatenation over the parts of a response."""

import base64
import json

import numpy as np
import pytest
from engine_setup import setup_for

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_sglang.experts import ExpertSizes
from slime_sglang.generation import SglangRunning
from slime_sglang.plugin import Sglang

SIZES = ExpertSizes(layers=2, top_k=3, experts=8)
PROMPT = np.array([5, 6, 7], np.int32)


def ids_of(first, rows):
    return ((np.arange(first, first + rows)[:, None, None] + np.arange(6).reshape(2, 3)) % 8).astype(np.int32)


def reply(tokens, ids, reason="length"):
    ids_field = {} if ids is None else {"routed_experts": base64.b64encode(ids.tobytes()).decode()}
    pairs = [[-0.5, token, None] for token in tokens]
    return {
        "meta_info": {
            "finish_reason": {"type": reason}, "output_token_logprobs": pairs, "weight_version": "default", **ids_field,
        }
    }  # fmt: skip


def running(start=0, **sampling):
    params = SamplingParams(**({"max_new_tokens": 9} | sampling))
    return SglangRunning(
        vocab_size=25,
        experts=SIZES,
        request=GenerateRequest(request_id="a", token_ids=PROMPT, sampling=params, seed=1, routed_experts_from=start),
    )


def take(run, tokens, ids, reason="length"):
    return run.take(reply(tokens, ids, reason), expected_version=-1, server="engine 0")


def test_each_part_of_a_response_has_only_new_expert_ids():
    run = running(start=1)
    assert run.body(50)["routed_experts_start_len"] == 1
    take(run, [8, 9], ids_of(1, 3), "abort")
    run.interrupt()
    assert run.body(50)["routed_experts_start_len"] == 4
    # Ended before it had a token.
    take(run, [], None, "abort")
    run.interrupt()
    take(run, [1, 2], ids_of(40, 2))
    ids = run.completion(FinishReason.LENGTH, 0).routed_experts
    assert ids.dtype == np.uint8
    assert np.array_equal(ids, np.concatenate([ids_of(1, 3), ids_of(40, 2)]))


@pytest.mark.parametrize(("stop", "kept"), [("ab", 4), ("abcde", 0)])
def test_tokens_that_are_written_again_choose_again(stop, kept):
    run = running(stop=(stop,))
    take(run, [8, 9, 4], ids_of(0, 5), "abort")
    run.interrupt()
    assert run.experts_from == (3 + 1 - 1 if kept else 0)
    asked = run.body(50)
    assert asked["routed_experts_start_len"] == run.experts_from <= len(asked["input_ids"])


def test_a_request_without_expert_ids_gets_none():
    run = running(start=None)
    assert not [name for name in run.body(50) if "expert" in name]
    take(run, [8], None)
    assert run.completion(FinishReason.LENGTH, 0).routed_experts is None


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (None, "it has no expert ids, but those of 4 tokens were requested"),
        (ids_of(0, 3), "it has 18 expert ids, but 4 tokens in 2 layers have 3 each"),
        (ids_of(0, 4) + 5, "its expert ids are 5 to 12, but the model has 8"),
    ],
)
def test_invalid_expert_ids_are_errors(ids, expected):
    with pytest.raises(EngineError, match=expected):
        take(running(), [8, 9], ids)


def test_sizes_are_the_models(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 4, "n_routed_experts": 300, "num_experts_per_tok": 2})
    )
    sizes = ExpertSizes.of(tmp_path)
    assert (sizes.layers, sizes.top_k, sizes.experts) == (4, 2, 300)
    wide = sizes.read(base64.b64encode(np.full(8, 299, np.int32).tobytes()), 1)
    assert wide.dtype == np.uint16
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    with pytest.raises(EngineError, match="has no experts"):
        ExpertSizes.of(tmp_path)


async def test_a_router_drops_the_request_for_expert_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    asked = setup_for(tmp_path, tmp_path, routed_experts=True)
    with pytest.raises(EngineError, match="sglang-router does not forward the request for expert ids"):
        await Sglang.build(Sglang.Config(router_policy="round_robin")).start(asked)
    with pytest.raises(EngineError, match="has no experts"):
        await Sglang.build(Sglang.Config()).start(asked)


async def test_an_sglang_that_pins_memory_of_expert_ids_has_none_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_sglang.engine.in_source", lambda *given: False)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2})
    )
    with pytest.raises(EngineError, match=r"engine 0: .* the installed SGLang pins the memory for expert ids"):
        await Sglang.build(Sglang.Config()).start(setup_for(tmp_path, tmp_path, routed_experts=True))
