"""Reading vLLM's responses, without a server."""

import pickle

import numpy as np
import pytest

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_vllm.connection import VllmConnection
from slime_vllm.generation import VllmRunning


def running():
    request = GenerateRequest(
        request_id="a/1/0", token_ids=np.array([1, 2, 3], np.int32), sampling=SamplingParams(max_new_tokens=8), seed=5
    )
    return VllmRunning(request=request, vocab_size=25)


def reply(tokens, **changes):
    content = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in tokens]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
    }
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"request_id": "x", "choices": [choice | changes], "usage": usage}


@pytest.fixture(params=["here", "elsewhere"])
def take(request):
    """Reads a response, as it is or as a rollout worker returns it."""

    def read(response):
        if request.param == "elsewhere":
            response = pickle.loads(pickle.dumps(VllmConnection.columns(response)))  # noqa: S301 - made here
        run = running()
        reason = run.take(response, expected_version=3, server="engine 0")
        return run.completion(reason, 0)

    return read


def test_a_response_is_read(take):
    completion = take(reply([7, 8]))
    assert completion.token_ids.tolist() == [7, 8]
    assert completion.token_ids.dtype == np.int32
    assert completion.log_probs.tolist() == [-0.5, -0.5]
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.cached_tokens == 2
    assert [tuple(span) for span in completion.spans] == [(3, 0, 2)]
    assert take(reply([7]) | {"usage": {"prompt_tokens_details": None}}).cached_tokens == 0


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("<html>busy</html>", "is invalid"),
        ({"choices": []}, "is invalid"),
        (reply([7, 25]), "token 25 is not in the model's vocabulary of 25"),
        (reply([7] * 9), "it has 9 tokens, more than the 8 requested"),
        (reply([7, 8], token_ids=[7, 9]), "log-probs of 2 other tokens"),
        (reply([7, 8], token_ids=[7]), "log-probs of 2 other tokens"),
        (reply([7, 8], weight_versions=[{"version": "3", "start": 0, "end": 1}]), "do not cover"),
        (reply([7], weight_versions=[{"version": "5", "start": 0, "end": 1}]), "version 5"),
        (reply([7], finish_reason="exploded"), "exploded"),
    ],
)
def test_invalid_responses_are_errors(take, response, words):
    with pytest.raises(EngineError, match="engine 0") as caught:
        take(response)
    assert words in str(caught.value)
