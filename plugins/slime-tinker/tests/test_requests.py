"""Order, repetition, chunks, long polling, snapshots, tenants, limits and errors, against models that note their calls."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from scripted_models import ScriptedModels
from sdk_calls import limits, retention, serving, settings, two_tenants

from slime_tinker.sampler_weights import OpenWeights

pytestmark = pytest.mark.asyncio


def kinds(models, model):
    return [call[0] for call in models.done[model]]


async def test_requests_run_in_the_order_of_their_numbers(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session(), seed=3)
        step = await calls.optim_step(model, 3)
        second = await calls.forward_backward(model, 2, 8)
        assert (await calls.fetch(step)).json()["type"] == "try_again"
        first = await calls.forward_backward(model, 1, 7)
        assert (await calls.result(step))["metrics"]["step"] == 1
        assert models.done[model] == [
            ["create", 3],
            ["forward_backward", [7]],
            ["forward_backward", [8]],
            ["optim_step", 0.5],
        ]
        outputs = [await calls.result(one) for one in (first, second)]
        assert [output.metrics["loss:sum"] for output in outputs] == [4.0, 6.0]
        assert np.frombuffer(outputs[0].loss_fn_outputs[0].fields["logprobs"].data, np.float32).tolist() == [-2.0, -2.0]


async def test_a_request_that_is_sent_twice_runs_once(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        model = await calls.model(session)
        assert await calls.model(session) == model
        ids = await asyncio.gather(*(calls.optim_step(model, 1) for _ in range(5)))
        assert len(set(ids)) == 1
        await calls.result(ids[0])
        assert await calls.optim_step(model, 1) == ids[0]
        await calls.result(await calls.optim_step(model, 2))
        assert kinds(models, model) == ["create", "optim_step", "optim_step"]


async def test_a_failed_request_lets_the_next_ones_run(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session())
        wrong, step = await calls.forward_backward(model, 1, 99), await calls.optim_step(model, 2)
        failed = await calls.result(wrong)
        assert failed["category"] == "user"
        assert "data[0].model_input[0] = 99" in failed["error"]
        assert "metrics" in await calls.result(step)


async def test_a_gap_that_nothing_fills_ends(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path, retention=retention(gap_s=0.0))) as (service, calls):
        model = await calls.model(await calls.session())
        step = await calls.optim_step(model, 2)
        await asyncio.sleep(0.01)
        await service.clean_once()
        assert "metrics" in await calls.result(step)


async def test_tenants_take_turns(tmp_path):
    """One with many requests does not delay another one's."""
    models = ScriptedModels()
    keys, one, two = two_tenants()
    async with serving(models, settings(tmp_path), lambda: keys) as (service, calls):
        calls.key = one
        busy = await calls.model(await calls.session())
        calls.key = two
        other = await calls.model(await calls.session())
        calls.key = one
        models.gate.clear()
        steps = [await calls.optim_step(busy, seq) for seq in range(1, 6)]
        calls.key = two
        last = await calls.optim_step(other, 1)
        models.calls.clear()
        # What each has used counts, also the time of a slow disk.
        service.turns._used.clear()
        models.gate.set()
        await calls.result(last)
        calls.key = one
        await calls.result(steps[-1])
        assert models.calls.index(f"{other} optim_step") <= 2


async def test_another_tenants_things_are_not_there(tmp_path):
    models = ScriptedModels()
    keys, one, two = two_tenants()
    async with serving(models, settings(tmp_path), lambda: keys) as (_, calls):
        calls.key = one
        session = await calls.session()
        model = await calls.model(session)
        saved = await calls.post("save_weights", model_id=model, seq_id=1, path="mine")
        path = (await calls.result(saved.json()["request_id"]))["path"]
        step = await calls.optim_step(model, 2)
        await calls.result(step)
        calls.key = two
        own = await calls.session()
        refused = [
            await calls.post("get_info", model_id=model),
            await calls.post("optim_step", model_id=model, seq_id=3, adam_params={}),
            await calls.post("session_heartbeat", session_id=session),
            await calls.post("create_sampling_session", session_id=own, sampling_session_seq_id=0, model_path=path),
            await calls.post("load_weights", session_id=own, model_seq_id=0, path=path, optimizer=True),
            await calls.post("weights_info", tinker_path=path),
            await calls.fetch(step),
            await calls.post(f"sessions/{session}/finish"),
        ]
        assert [response.status_code for response in refused] == [404] * len(refused)
        assert (await calls.get("checkpoints"))["checkpoints"] == []
        assert (await calls.get("training_runs"))["training_runs"] == []
        calls.key = "tml-guessed"
        assert (await calls.post("create_session", tags=[], user_metadata=None, sdk_version="0")).status_code == 401


async def test_snapshots_are_what_the_model_was(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session())
        samplers = []
        for seq in (1, 3, 5):
            saved = await calls.post(
                "save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq
            )
            samplers.append((await calls.result(saved.json()["request_id"]))["sampling_session_id"])
            await calls.result(await calls.optim_step(model, seq + 1))
        # Two are open at a time; the others are opened when they are needed.
        for round_number in range(2):
            found = [await calls.result(await calls.sample(sampler, round_number)) for sampler in samplers]
            tokens = [int(np.frombuffer(one.sequences[0].tokens, np.int32)[0]) for one in found]
            assert tokens == [1, 2, 3]
        assert models.open <= 2


async def test_draws_depend_on_session_number_and_sample_alone(tmp_path):
    async def drawn(calls, sampler, seq, **given):
        response = await calls.result(await calls.sample(sampler, seq, num_samples=3, **given))
        return [float(np.frombuffer(one.logprobs, np.float32)[0]) for one in response.sequences]

    found = []
    for name in ("a", "b"):
        async with serving(ScriptedModels(), settings(tmp_path / name)) as (_, calls):
            session = await calls.session()
            created = await calls.post(
                "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
            )
            sampler = created.json()["sampling_session_id"]
            order = (0, 1) if name == "a" else (1, 0)
            found.append({seq: await drawn(calls, sampler, seq) for seq in order})
            seeded = [await drawn(calls, sampler, seq, sampling_params={"max_tokens": 1, "seed": 5}) for seq in (2, 3)]
            assert seeded[0] == seeded[1]
    assert found[0] == found[1]
    assert len({*found[0][0], *found[0][1]}) == 6


async def test_limits(tmp_path):
    models = ScriptedModels()
    chosen = settings(tmp_path, limits=limits(max_models=1, max_tokens=3, max_body_bytes=2000, max_pending=2))
    async with serving(models, chosen) as (_, calls):
        session = await calls.session()
        model = await calls.model(session)
        second = await calls.post(
            "create_model", session_id=session, model_seq_id=1, base_model="base", lora_config={"rank": 4}
        )
        assert second.status_code == 400
        assert "you have 1 models" in second.json()["detail"]
        failed = await calls.result(await calls.forward_backward(model, 1, 5, 6))
        assert "4 tokens, and a request may have 3" in failed["error"]
        large = await calls.post("forward_backward", b"x" * 3000, "application/x-protobuf")
        assert large.status_code == 413
        headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
        bomb = zstandard.ZstdCompressor().compress(bytes(10**7))
        assert len(bomb) < 2000
        assert (await calls.client.post("forward_backward", content=bomb, headers=headers)).status_code == 413
        models.gate.clear()
        for seq in (2, 3):
            await calls.optim_step(model, seq)
        assert (await calls.post("optim_step", model_id=model, seq_id=4, adam_params={})).status_code == 429
        models.gate.set()


async def test_files_are_written_beside_the_turns_of_others(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        slow, other = await calls.model(session), await calls.model(session, 1)
        models.disk.clear()
        saved = await calls.post("save_weights", model_id=slow, seq_id=1, path="slow")
        twice = await calls.post("save_weights", model_id=slow, seq_id=2, path="slow")
        step = await calls.optim_step(slow, 3)
        assert (await calls.result(await calls.optim_step(other, 1)))["metrics"]["step"] == 1
        # Its own results come in their order.
        assert models.done[slow][-1] == ["optim_step", 0.5]
        assert (await calls.fetch(step)).json()["type"] == "try_again"
        models.disk.set()
        path = (await calls.result(saved.json()["request_id"]))["path"]
        assert "is being written" in (await calls.result(twice.json()["request_id"]))["error"]
        await calls.result(step)
        # What was saved is from before the step.
        loaded = await calls.post("load_weights", model_id=slow, seq_id=4, path=path, optimizer=True)
        await calls.result(loaded.json()["request_id"])
        assert models.done[slow] == [["create", 0]]


async def test_weights_are_opened_in_the_order_of_requests(tmp_path):
    """A stream of requests for what is open does not keep out those that wait for others to be closed."""
    models = ScriptedModels()
    models.max_weights = 1
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "done.json").write_text("[]")
    order, trainer = [], ThreadPoolExecutor(1)
    weights = OpenWeights(models, trainer)

    async def use(name, until):
        async with weights.using(tmp_path / name):
            order.append(name)
            opened.set()
            await until.wait()

    opened, held, free = asyncio.Event(), asyncio.Event(), asyncio.Event()
    free.set()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(use("one", held))
        await opened.wait()
        for name in ("two", "one"):
            tasks.create_task(use(name, free))
            for _ in range(9):
                await asyncio.sleep(0)
        assert order == ["one"]
        held.set()
    assert order == ["one", "two", "one"]
    trainer.shutdown()


async def test_what_is_wrong_is_named(tmp_path):
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        session = await calls.session()
        model = await calls.model(session)
        cases = [
            (
                await calls.post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": "x"}),
                422,
                "learning_rate",
            ),
            (await calls.post("optim_step", model_id=model, seq_id=0, adam_params={}), 400, "seq_id = 0"),
            (
                await calls.post("create_model", session_id=session, model_seq_id=1, base_model="base"),
                400,
                "lora_config: missing",
            ),
            (
                await calls.post(
                    "create_model", session_id="x", model_seq_id=1, base_model="base", lora_config={"rank": 4}
                ),
                404,
                "session_id x",
            ),
            (await calls.post("forward_backward", b"{}"), 400, "must be protobuf"),
            (await calls.post("forward_backward", b"\xff", "application/x-protobuf"), 400, "no ForwardBackwardRequest"),
            (await calls.post("copy_weights"), 404, "no such endpoint"),
            (await calls.fetch("unknown"), 404, "unknown"),
        ]
        for response, status, word in cases:
            assert response.status_code == status, response.text
            assert word in response.json()["detail"]
        created = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        sampler = created.json()["sampling_session_id"]
        wrong = [
            ({"num_samples": 0}, "num_samples = 0"),
            ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: draws in the prompt's places are not served here"),
            (
                {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}},
                "target_prompt_logprobs: log-probs of other tokens in the prompt's places are not served here. Leave it out",
            ),
            ({"topk_sample_logprobs": 51}, "topk_sample_logprobs = 51: must be from 0 to 50"),
            ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n = 3: must be from 1 to 2"),
            ({"sampling_params": {"max_tokens": 1, "stop": []}}, "stop = []"),
            ({"sampling_params": {"max_tokens": 1, "top_p": 0}}, "top_p"),
            ({"prompt": {"chunks": [{"tokens": [77], "type": "encoded_text"}]}}, "prompt[0] = 77"),
        ]
        for seq, (given, word) in enumerate(wrong):
            failed = await calls.result(await calls.sample(sampler, seq, **given))
            assert failed["category"] == "user"
            assert word in failed["error"]


async def test_prompt_log_probs_of_the_last_tokens(tmp_path):
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        session = await calls.session()
        created = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        sampler = created.json()["sampling_session_id"]
        found = await calls.result(await calls.sample(sampler, 0, prompt_logprobs=True, prompt_logprobs_last_n=1))
        assert np.frombuffer(found.prompt_logprobs, np.float32).tolist() == pytest.approx(
            [float("nan"), float("nan"), -2.0], nan_ok=True
        )


async def test_a_cancelled_sample_ends(tmp_path):
    models = ScriptedModels()
    models.hold_samples = True
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        created = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        request = await calls.sample(created.json()["sampling_session_id"], 0)
        await asyncio.to_thread(models.has_waiting.wait, 20)
        await calls.post("cancel_future", request_id=request)
        assert "cancelled" in (await calls.result(request))["error"]
        assert models.waiting[0].cancelled()
