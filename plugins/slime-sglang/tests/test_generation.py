"""Bodies for /generate, checks of its responses, and how a response continues after a weight update."""

import math
import pickle

import numpy as np
import pytest

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_serving.running import RequestIds
from slime_sglang.connection import SglangConnection
from slime_sglang.generation import SglangRunning


def running(**sampling):
    params = SamplingParams(**({"max_new_tokens": 8} | sampling))
    return SglangRunning(
        vocab_size=25,
        request=GenerateRequest(
            request_id="a/1/0", token_ids=np.array([5, 6], np.int32), sampling=params, seed=2**63 + 7
        ),
    )


def reply(tokens, reason="length", spans=None, version="default", **meta):
    pairs = [[-0.5 - place, token, None] for place, token in enumerate(tokens)]
    message = (
        {}
        if spans is None
        else {"weight_versions": [dict(zip(("version", "start", "end"), s, strict=True)) for s in spans]}
    )
    return {
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": pairs,
            "weight_version": version,
            **message,
            **meta,
        }
    }


@pytest.fixture(params=["here", "elsewhere"])
def take(request):
    """Reads a response, as it is or as a rollout worker returns it."""

    def read(run, response, expected=None):
        if request.param == "elsewhere":
            response = pickle.loads(pickle.dumps(SglangConnection.columns(response)))  # noqa: S301 - made here
        return run.take(response, expected_version=expected, server="engine 0 (http://x)")

    return read


def test_body():
    body = running(temperature=0.7, stop=("ab",), stop_token_ids=(3,), min_new_tokens=2).body(room=100)
    assert body["input_ids"].tolist() == [5, 6]
    params = body["sampling_params"]
    assert (params["temperature"], params["stop"], params["stop_token_ids"]) == (0.7, ["ab"], [3])
    assert (params["min_new_tokens"], params["max_new_tokens"], params["sampling_seed"], params["n"]) == (2, 8, 7, 1)
    # Nothing may end it before its budget, which the context may cut.
    params = running(min_new_tokens=8, stop_token_ids=(3,)).body(room=5)["sampling_params"]
    assert params["ignore_eos"] is True
    assert params["max_new_tokens"] == 5
    assert not {"min_new_tokens", "stop_token_ids"} & set(params)


def test_a_response_of_two_parts(take):
    run = running()
    assert take(run, reply([7, 8, 9], "abort", cached_tokens=2), expected=-1) is FinishReason.ABORT
    run.interrupt()
    body = run.body(room=100)
    assert body["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert body["sampling_params"]["max_new_tokens"] == 5
    assert take(run, reply([1], "stop", spans=[("4", 0, 1)], cached_tokens=4), expected=4) is FinishReason.STOP
    whole = run.completion(FinishReason.STOP, 0)
    assert whole.token_ids.tolist() == [7, 8, 9, 1]
    assert whole.log_probs.tolist() == [-0.5, -1.5, -2.5, -0.5]
    assert [tuple(span) for span in whole.spans] == [(-1, 0, 3), (4, 3, 4)]
    assert whole.cached_tokens == 2


def test_a_grammar_begins_again_after_an_interruption(take):
    run = running(structural_tag="{}")
    take(run, reply([7, 8], "abort"))
    run.interrupt()
    body = run.body(room=100)
    assert (body["input_ids"].tolist(), body["sampling_params"]["structural_tag"]) == ([5, 6], "{}")
    assert "structural_tag" not in running().body(room=100)["sampling_params"]


def test_drafts_of_parts_add_up(take):
    """Rates of the whole response, by hand: 6 of 12 drafts accepted, 8 tokens in 4 passes."""
    run = running()
    take(run, reply([7, 8, 9], "abort", spec_verify_ct=2, spec_num_correct_drafts=1, spec_num_proposed_drafts=6))
    run.interrupt()
    # The names of SGLang 0.5.16.
    take(run, reply([1, 2, 3, 4, 5], spec_verify_ct=2, spec_accepted_drafts=5, spec_proposed_drafts=6))
    extra = run.completion(FinishReason.LENGTH, 0).extra
    assert extra == {"spec_verify_ct": 4.0, "spec_accept_length": 2.0, "spec_accept_rate": 0.5}
    run = running()
    take(run, reply([1]))
    assert run.completion(FinishReason.LENGTH, 0).extra == {}


def test_a_stop_string_across_two_parts_is_not_missed(take):
    run = running(stop=("xyz", "q"))
    take(run, reply([7, 8, 9, 10, 11], "abort", spans=[("0", 0, 1), ("1", 1, 5)]))
    run.interrupt()
    # A string of three characters is written by three tokens at most: two of them could are at the end.
    assert run.token_ids.tolist() == [7, 8]
    assert [tuple(span) for span in run.spans] == [(0, 0, 1), (1, 1, 2)]
    take(run, reply([1], "stop", version="1"))
    assert [tuple(span) for span in run.completion(FinishReason.STOP, 0).spans] == [(0, 0, 1), (1, 1, 3)]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("<html>busy</html>", "is invalid"),
        ({"text": "hello"}, "is invalid"),
        ([1, 2], "is invalid"),
        (reply([7, 25]), "token 25 is not in the model's vocabulary of 25"),
        (reply([7] * 9), "it has 9 tokens, more than the 8 requested"),
        (reply([7], output_token_logprobs=[[math.nan, 7, None]]), "is not a log-prob"),
        (reply([7], output_token_logprobs=[[0.5, 7, None]]), "is not a log-prob"),
        (reply([7], output_token_logprobs=[[None, 7, None]]), "nan is not a log-prob"),
        (reply([7], output_token_logprobs=[[-1.0, None, None]]), "is invalid"),
        (reply([7], output_token_logprobs=[[-1.0, 2**70, None]]), "is invalid"),
        (reply([7], version="mine"), "is invalid"),
        (reply([7, 8], spans=[("3", 0, 1)]), "do not cover"),
        (reply([7], version="5"), "its tokens have version 5, but the server was sent version 3"),
        (reply([7], "exploded"), "exploded"),
        (reply([], "abort", finish_reason={"type": "abort", "status_code": 400, "message": "too long"}), "too long"),
    ],
)
def test_invalid_responses_are_errors(take, response, words):
    with pytest.raises(EngineError, match="engine 0") as caught:
        take(running(), response, expected=3)
    assert words in str(caught.value)


def test_ids_that_do_not_meet():
    ids = RequestIds()
    made = [ids.next_for(name) for name in ("a/1", "a/1", *("a/1" for _ in range(20)), "a/11", "a")]
    assert len(set(made)) == len(made)
    assert all(made[0].startswith("a/1#") for _ in made[:1])
    # An abort ends whatever begins with its id.
    assert not [(one, two) for one in made for two in made if one != two and two.startswith(one)]
