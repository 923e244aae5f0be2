"""The service as agents see it: prompts, trajectories, and refusals."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import numpy as np
import pytest

from slime_buffer_service.app import BufferApp
from slime_buffer_service.config import ExternalAgentsConfig
from slime_buffer_service.generator import ExternalAgents
from slime_buffer_service.prompt_queue import PromptQueue
from slime_core.rollout.groups import check_samples
from slime_core.types.sample import Status, VersionSpan
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import BUDGET, client_of, episode_of, vocab_size

TOKEN = "a-token"
RESPONSE = {"token_ids": [3, 4, 5], "log_probs": [-0.5, 0.0, -1.25], "loss_mask": [1, 0, 1]}


@dataclass
class Service:
    client: httpx.AsyncClient
    queue: PromptQueue
    generator: ExternalAgents
    tasks: list

    def ask(self, number=3, *, versions=range(2, 6), stop=None, **options):
        """Requests a response; the task returns its samples."""
        client = client_of(ScriptedEngine(vocab_size=vocab_size()))
        episode = episode_of(client, number, stop=stop, **options)
        episode.trained_versions = lambda: versions
        self.tasks.append(asyncio.create_task(self.generator.generate(episode)))
        return self.tasks[-1]

    async def take(self, count=1, wait_s=1.0):
        response = await self.post("/get_samples", {"num_samples": count, "wait_s": wait_s})
        assert response.status_code == 200, response.text
        return response.json()["samples"]

    async def push(self, ticket, **pushed):
        """Status, and the result of this one trajectory."""
        response = await self.post("/add_samples", {"samples": [{"ticket": ticket, **pushed}]})
        body = response.json()
        return response.status_code, body["results"][0] if "results" in body else body

    async def post(self, path, body):
        return await self.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@asynccontextmanager
async def service(tmp_path, *, clock=None, **options):
    """The service in this process, without a socket."""
    config = ExternalAgentsConfig(port=0, token_file=str(tmp_path / "token"), **options)
    generator = ExternalAgents(config)
    if clock is not None:
        generator._queue = PromptQueue(lease_s=config.lease_s, max_leased=config.max_leased, clock=clock)
    generator._server = "none"
    app = BufferApp(generator._queue, max_body_bytes=config.max_body_bytes, give_labels=config.give_labels).asgi(TOKEN)
    transport = httpx.ASGITransport(app=app)
    headers = {"authorization": f"Bearer {TOKEN}"}
    tasks = []
    async with httpx.AsyncClient(transport=transport, base_url="http://buffer", headers=headers) as client:
        yield Service(client, generator._queue, generator, tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_prompt_is_fetched_and_a_trajectory_returned(tmp_path):
    async with service(tmp_path) as s:
        task = s.ask(number=3)
        (given,) = await s.take()
        assert given["ticket"] == "train-12"
        assert (given["prompt"], given["max_new_tokens"], given["version"]) == ("3+3=", BUDGET, 5)
        assert "label" not in given
        pushed = {**RESPONSE, "reward": 0.5, "metadata": {"tries": 2}, "counts": {"turns": 2}, "status": "truncated"}
        assert await s.push(given["ticket"], **pushed) == (200, {"ticket": "train-12", "accepted": True})
        (sample,) = check_samples(await task, s.generator)
    assert sample.tokens.tolist() == [*given["prompt_token_ids"], 3, 4, 5]
    assert sample.rollout_log_probs.tolist() == [-0.5, 0.0, -1.25]
    assert sample.loss_mask.tolist() == [1, 0, 1]
    # The version of the ticket.
    assert sample.spans == (VersionSpan(5, 0, 1), VersionSpan(5, 2, 3))
    assert (sample.reward, sample.status) == (0.5, Status.TRUNCATED)
    assert (sample.metadata["tries"], sample.counts["turns"]) == (2, 2)


async def test_an_empty_response_and_spans_of_several_versions(tmp_path):
    async with service(tmp_path, give_labels=True) as s:
        first, second = s.ask(number=1), s.ask(number=2)
        one, two = await s.take(5)
        assert (one["label"], two["label"]) == ("2", "4")
        assert (await s.push(one["ticket"], token_ids=[], log_probs=[]))[0] == 200
        spans = [[3, 0, 1], [4, 1, 3]]
        assert (await s.push(two["ticket"], token_ids=[3, 4, 5], log_probs=[-1, -1, -1], spans=spans))[0] == 200
        (empty,), (other,) = await first, await second
    assert (empty.response_length, empty.spans, empty.status) == (0, (), Status.COMPLETED)
    assert other.spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))


@pytest.mark.parametrize(
    ("changed", "status", "code", "text"),
    [
        ({"log_probs": [-0.5]}, 422, "invalid", "log_probs has 1 entries for 3 token_ids"),
        ({"loss_mask": [1]}, 422, "invalid", "loss_mask has 1 entries for 3 token_ids"),
        ({"loss_mask": [1, 2, 1]}, 422, "invalid", "loss_mask.1: Input should be 0 or 1"),
        ({"log_probs": [-0.5, 0.0, 0.1]}, 422, "invalid", "log_probs.2: Input should be less than or equal to 0"),
        ({"log_probs": [-0.5, -1.0, -1.0]}, 422, "invalid", "log_probs[1] is not 0, but loss_mask[1] is"),
        ({"token_ids": [3, 4, 10**6]}, 422, "invalid", "1000000 is not among the tokenizer's"),
        ({"token_ids": [3, -4, 5]}, 422, "invalid", "token_ids.1: Input should be greater than or equal to 0"),
        ({"token_ids": [3, "4", 5]}, 422, "invalid", "token_ids.1: Input should be a valid integer"),
        ({"reward": "good"}, 422, "invalid", "reward: Input should be a valid number"),
        ({"status": "aborted"}, 422, "invalid", "status: Input should be 'completed' or 'truncated'"),
        ({"temperature": 1}, 422, "invalid", "temperature: Extra inputs are not permitted"),
        ({"version": 6}, 422, "invalid", "version 6 has not been trained yet: the policy's is 5"),
        ({"version": 1}, 409, "stale", "version 1 is too old: tokens of versions 2 to 5 are trained"),
        ({"version": 5, "spans": [[5, 0, 3]]}, 422, "invalid", "version and spans are both set"),
        ({"spans": [[5, 0, 4]]}, 422, "invalid", "spans[0] is [0, 4) of 3 tokens"),
        ({"spans": [[5, 0, 2], [5, 1, 3]]}, 422, "invalid", "spans[1] begins at 1, before the one ahead of it ends (2)"),
        ({"spans": [[5, 0, 1]]}, 422, "invalid", "no span has the policy version of token 2"),
        ({"spans": [[1, 0, 1], [5, 2, 3]]}, 409, "stale", "version 1 is too old"),
        ({"token_ids": [3] * 17, "log_probs": [-1] * 17, "loss_mask": None}, 422, "too_long", "17 tokens, but the ticket has"),
        ({"ticket": "train-99"}, 404, "unknown_ticket", 'there is no ticket "train-99"'),
    ],
)  # fmt: skip
async def test_a_refusal_leaves_the_ticket_open(tmp_path, changed, status, code, text):
    async with service(tmp_path) as s:
        task = s.ask()
        (given,) = await s.take()
        found, result = await s.push(**{"ticket": given["ticket"], **RESPONSE, **changed})
        assert (found, result["code"], result["accepted"]) == (status, code, False)
        assert text in result["error"]
        assert not task.done()
        assert (await s.push(given["ticket"], **RESPONSE))[0] == 200
        (sample,) = await task
        assert sample.response_length == 3


async def test_each_trajectory_of_a_request_is_checked_by_itself(tmp_path):
    async with service(tmp_path) as s:
        task = s.ask(number=3)
        s.ask(number=4)
        await s.take(2)
        samples = [{"ticket": "train-16"}, {"ticket": "train-12", **RESPONSE}, {"ticket": "none", **RESPONSE}]
        response = await s.post("/add_samples", {"samples": samples})
        assert response.status_code == 422
        assert [result["accepted"] for result in response.json()["results"]] == [False, True, False]
        assert "token_ids: Field required" in response.json()["results"][0]["error"]
        await task


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/add_samples", b"nonsense", 422, "Invalid JSON"),
        ("/add_samples", b"[]", 422, "Input should be an object"),
        ("/add_samples", b'{"samples": []}', 422, "samples: List should have at least 1 item"),
        ("/add_samples", b'{"samples": [{"ticket": NaN}]}', 422, "NaN and infinity are not JSON"),
        ("/get_samples", b'{"num_samples": 0}', 422, "num_samples: Input should be greater than or equal to 1"),
        ("/get_samples", b'{"num": 1}', 422, "num: Extra inputs are not permitted"),
        ("/add_samples", b'{"samples": "' + b"a" * 2000 + b'"}', 413, "more than 1024 bytes"),
        ("/generate", b'{"ticket": "none", "token_ids": [1]}', 404, "there is no ticket"),
        ("/put_samples", b"{}", 404, ""),
    ],
)
async def test_invalid_bodies_are_refused(tmp_path, path, body, status, text):
    async with service(tmp_path, max_body_bytes=1024) as s:
        response = await s.post(path, body)
        assert response.status_code == status
        assert text in response.text


async def test_the_token(tmp_path):
    async with service(tmp_path) as s:
        for headers in ({"authorization": "Bearer another"}, {"authorization": ""}):
            response = await s.client.post("/get_samples", json={}, headers=headers)
            assert (response.status_code, "token" in response.json()["error"]) == (401, True)
        response = await s.client.get("/health", headers={"authorization": ""})
        assert response.json() == {"status": "ok", "waiting": 0, "leased": 0}


async def test_the_first_response_counts(tmp_path):
    clock = Clock()
    async with service(tmp_path, clock=clock, lease_s=10) as s:
        task = s.ask()
        (given,) = await s.take()
        assert await s.take(wait_s=0) == []
        clock.now = 10.0
        (again,) = await s.take()
        assert again["ticket"] == given["ticket"]
        assert (await s.push(given["ticket"], **RESPONSE))[0] == 200
        status, result = await s.push(given["ticket"], **RESPONSE)
        assert (status, result["code"]) == (409, "ticket_ended")
        assert "already has a response" in result["error"]
        await task
        assert (s.queue.num_waiting, s.queue.num_leased) == (0, 0)


@pytest.mark.parametrize(("late", "version"), [(True, 3), (False, 7)])
async def test_tokens_have_the_policy_version_of_their_lease(tmp_path, late, version):
    clock, trained = Clock(), [range(2, 4), range(2, 8)]
    async with service(tmp_path, clock=clock, lease_s=10) as s:
        task = s.ask(versions=trained[0])
        s.ask(number=4)
        await asyncio.sleep(0)
        # A version of no lease, such as one of an earlier run.
        assert (await s.push("train-12", **RESPONSE))[1]["code"] == "stale"
        (given,) = await s.take()
        s.queue.find(given["ticket"]).episode.trained_versions = lambda: trained[1]
        clock.now = 10.0
        _, again = await s.take(2)
        assert (given["version"], again["version"]) == (3, 7)
        tickets = [given["ticket"], again["ticket"]] if late else [again["ticket"], given["ticket"]]
        assert (await s.push(tickets[0], **RESPONSE))[0] == 200
        (sample,) = await task
        status, result = await s.push(tickets[1], **RESPONSE)
        assert (status, result["code"]) == (409, "ticket_ended")
        assert s.queue.num_leased == 1
    assert {span.version for span in sample.spans} == {version}


async def test_agents_that_hold_too_many_prompts_get_429(tmp_path):
    async with service(tmp_path, max_leased=2) as s:
        for number in range(3):
            s.ask(number)
        await asyncio.sleep(0)
        one, _ = await s.take(3)
        refused = await s.post("/get_samples", {"wait_s": 1})
        assert (refused.status_code, refused.headers["retry-after"], refused.json()["code"]) == (429, "1", "full")
        await s.push(one["ticket"], **RESPONSE)
        (third,) = await s.take(3)
        assert third["ticket"] == "train-8"


async def test_an_agent_waits_for_a_prompt(tmp_path):
    async with service(tmp_path) as s:
        waiting = asyncio.create_task(s.take(wait_s=5))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        s.ask()
        assert len(await waiting) == 1


async def test_a_run_that_aborts_a_response(tmp_path):
    stop = asyncio.Event()
    async with service(tmp_path) as s:
        task = s.ask(stop=stop)
        (given,) = await s.take()
        stop.set()
        (sample,) = await task
        assert (sample.status, sample.response_length) == (Status.ABORTED, 0)
        status, result = await s.push(given["ticket"], **RESPONSE)
        assert (status, result["code"]) == (409, "ticket_ended")
        assert "aborted this response" in result["error"]


async def test_a_kept_part_is_continued(tmp_path):
    async with service(tmp_path) as s:
        task = s.ask()
        (given,) = await s.take()
        await s.push(given["ticket"], **RESPONSE)
        (kept,) = await task
        task = s.ask(kept=replace(kept, status=Status.ABORTED))
        (given,) = await s.take()
        assert (given["kept_token_ids"], given["max_new_tokens"]) == ([3, 4, 5], BUDGET - 3)
        await s.push(given["ticket"], token_ids=[7], log_probs=[-2.0])
        (sample,) = await task
    assert sample.response_tokens.tolist() == [3, 4, 5, 7]
    assert sample.rollout_log_probs.tolist() == [-0.5, 0.0, -1.25, -2.0]
    assert sample.spans[-1] == VersionSpan(5, 3, 4)


async def test_agents_without_an_engine_use_those_of_the_run(tmp_path):
    async with service(tmp_path) as s:
        task = s.ask(versions=range(9))
        (given,) = await s.take()
        prompt = given["prompt_token_ids"]
        response = await s.post("/generate", {"ticket": given["ticket"], "token_ids": prompt, "max_new_tokens": 4})
        result = response.json()
        assert response.status_code == 200
        assert 0 < len(result["token_ids"]) <= 4
        more = {key: result[key] for key in ("token_ids", "log_probs", "spans")}
        assert (await s.push(given["ticket"], **more))[0] == 200
        (sample,) = await task
        np.testing.assert_array_equal(sample.rollout_log_probs, np.array(result["log_probs"], np.float32))
        s.ask(number=4)
        (given,) = await s.take()
        for tokens, text in (([1], "do not begin"), ([*given["prompt_token_ids"], *[3] * BUDGET], "has room for")):
            response = await s.post("/generate", {"ticket": given["ticket"], "token_ids": tokens})
            assert (response.status_code, text in response.json()["error"]) == (422, True)


async def test_over_a_socket(tmp_path):
    generator = ExternalAgents(ExternalAgentsConfig(port=0, token_file=str(tmp_path / "token")))
    task = asyncio.create_task(generator.generate(episode_of(client_of(ScriptedEngine(vocab_size=vocab_size())))))
    while not generator.url:  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0.005)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    headers = {"authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}"}
    async with httpx.AsyncClient(base_url=generator.url, headers=headers, trust_env=False) as client:
        (given,) = (await client.post("/get_samples", json={"wait_s": 2})).json()["samples"]
        trajectory = {"ticket": given["ticket"], "token_ids": [5], "log_probs": [-1.0]}
        assert (await client.post("/add_samples", json={"samples": [trajectory]})).status_code == 200
    (sample,) = await task
    assert sample.response_tokens.tolist() == [5]
    await generator.close()
