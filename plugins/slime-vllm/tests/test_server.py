"""The engine on a real vLLM server, beside transformers alone."""

import asyncio

import numpy as np
import pytest
import torch
from vllm_setup import CLOSE, LONG, asked, differences, endless, load, require_close

from slime_core.types.completion import FinishReason
from slime_plugin_kit.listening_sockets import listening_sockets
from slime_plugin_kit.tiny_model import buckets_of, load_plain, log_probs_of, moved, named_weights

pytestmark = pytest.mark.vllm


async def test_log_probs_are_the_models(attached, model):
    """At the sampling temperature, for prompts of uneven lengths; a seed gives its tokens again."""
    async with attached() as engine:
        await load(engine, named_weights(load_plain(model, torch.float32)), 0)
        requests = [asked(f"r{n}", range(4, 6 + n), n, temperature=0.7 + 0.3 * n) for n in range(4)]
        responses = await engine.generate(requests)
        plain = load_plain(model)
        for request, response in zip(requests, responses, strict=True):
            assert len(response.token_ids) > 0
            require_close(differences(plain, request, response))
        (again,) = await engine.generate([asked("again", range(4, 6), 0, temperature=0.7)])
        assert again.token_ids.tolist() == responses[0].token_ids.tolist()

        sequence = np.concatenate([requests[1].token_ids, responses[1].token_ids]).astype(np.int32)
        whole, none = await engine.score([sequence, sequence], [len(sequence) - 1, 0])
        with torch.no_grad():
            expected, _ = log_probs_of(plain, sequence[:1].tolist(), sequence[1:].tolist())
        require_close(np.abs(whole - expected.numpy()))
        assert len(none) == 0


def test_servers_that_were_begun_early_use_no_device_before_their_start(served):
    """vLLM logs a line when a worker has joined the others on its device, and one when it has loaded the weights."""
    for text in ("rank 0 in world size 1", "Loading weights took"):
        assert [text in log for log in served.at_gate] == [False, False]
        assert [log.count(text) for log in served.logs] == [1, 1]


async def test_running_requests_continue_with_new_weights(attached, served, model):
    """Every token has the version that computed it, and the new ones' log-probs are those of the new weights: the head too,
    which no bucket has, because it is the embedding."""
    async with attached() as engine:
        plain = load_plain(model, torch.float32)
        await load(engine, named_weights(plain), 1)
        requests = [endless(f"l{n}", n) for n in range(4)]
        running = asyncio.create_task(engine.generate(requests))
        await served.until_generating()
        changed = moved(plain, seed=1)
        await load(engine, named_weights(changed), 2)
        assert await engine.version() == 2
        changed = changed.double()
        for request, response in zip(requests, await running, strict=True):
            assert [span.version for span in response.spans] == [1, 2]
            old, new = response.spans
            assert (old.start, old.end, new.end) == (0, new.start, LONG)
            assert response.finish_reason is FinishReason.LENGTH
            # Keys and values of the tokens before are the new weights', too.
            apart = differences(changed, request, response)
            require_close(apart[new.start :])
            assert apart[: old.end].max() > 100 * CLOSE


async def test_one_request_of_several_is_aborted(attached, served, model):
    async with attached() as engine:
        await load(engine, named_weights(load_plain(model, torch.float32)), 3)
        running = asyncio.create_task(engine.generate([endless(f"a{n}", n) for n in range(3)]))
        await served.until_generating()
        await engine.abort(["a1"])
        first, aborted, last = await running
        assert aborted.finish_reason is FinishReason.ABORT
        assert len(aborted.token_ids) == len(aborted.log_probs) < LONG
        assert {len(first.token_ids), len(last.token_ids)} == {LONG}
        await engine.health()


async def test_a_version_that_was_sent_in_part_is_sent_again(attached, model):
    async with attached() as engine:
        plain = load_plain(model, torch.float32)
        await engine.pause()
        await engine.load_bucket(buckets_of(named_weights(plain), 5, 3)[0])
        with pytest.raises(Exception, match="resume while a version is partly loaded"):
            await engine.resume()
        await load(engine, named_weights(plain), 5)
        request = asked("whole", [4, 5])
        (response,) = await engine.generate([request])
        require_close(differences(load_plain(model), request, response))


def test_nothing_is_open_without_the_token(served):
    for path in ("/pause", "/resume", "/update_weights", "/collective_rpc", "/inference/v1/generate"):
        assert served.ask(path, {}, token="wrong")[0] == 401
    assert [str(own) for own in listening_sockets(served.pid) if not own.is_loopback] == []
