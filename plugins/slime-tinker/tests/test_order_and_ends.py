"""Requests that come late, and models, sessions and checkpoints that end twice, at once, or while the server is killed."""

import asyncio
import sqlite3
from dataclasses import replace

import pytest
from scripted_models import ScriptedModels
from sdk_calls import killed, retention, serving, settings

from slime_tinker.errors import RequestError
from slime_tinker.journal import accepted

pytestmark = pytest.mark.asyncio


def held(service, request_id):
    """Two events: the request has come, and, which the test sets, it may be looked up and written down."""
    come, go, outcome = asyncio.Event(), asyncio.Event(), service.journal.outcome

    async def slow(asked):
        if asked == request_id:
            come.set()
            await go.wait()
        return await outcome(asked)

    service.journal.outcome = slow
    return come, go


async def step_after_a_gap(service, calls):
    """A model that has run requests 0 and 2."""
    model = await calls.model(await calls.session())
    step = await calls.optim_step(model, 2, lr=0.2)
    await asyncio.sleep(0.01)
    await service.clean_once()
    await asyncio.wait_for(calls.result(step), 60)
    return model


# --- Late requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_after_s", [0.0, 1e9], ids=["saved", "repeated"])
async def test_a_request_after_its_turn_fails_and_is_in_no_state(tmp_path, save_after_s):
    chosen = settings(tmp_path, retention=retention(gap_s=0.0), save_after_s=save_after_s)

    async def script(service, calls):
        model = await step_after_a_gap(service, calls)
        late = await calls.optim_step(model, 1, lr=0.1)
        assert "came after later requests" in (await calls.result(late))["error"]
        assert (await calls.result(await calls.optim_step(model, 3, lr=0.3)))["metrics"]["step"] == 2
        return model, late

    models = ScriptedModels()
    model, late = await killed(models, chosen, script)
    expected = [["create", 0], ["optim_step", 0.2], ["optim_step", 0.3]]
    assert models.done[model] == expected
    after = ScriptedModels()
    async with serving(after, chosen) as (_, calls):
        assert (await calls.result(await calls.optim_step(model, 4, lr=0.4)))["metrics"]["step"] == 3
        assert after.done[model] == [*expected, ["optim_step", 0.4]]
        assert "came after later requests" in (await calls.result(late))["error"]


async def test_a_gap_is_not_waited_for_again_after_a_restart(tmp_path):
    model = await killed(ScriptedModels(), settings(tmp_path, retention=retention(gap_s=0.0)), step_after_a_gap)
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        late = await calls.optim_step(model, 1, lr=0.1)
        assert "came after later requests" in (await asyncio.wait_for(calls.result(late), 60))["error"]
        await asyncio.wait_for(calls.result(await calls.optim_step(model, 3, lr=0.3)), 60)
        assert after.done[model] == [["create", 0], ["optim_step", 0.2], ["optim_step", 0.3]]


@pytest.mark.parametrize("save_after_s", [0.0, 1e9], ids=["saved", "repeated"])
async def test_a_late_request_without_a_result_fails_after_a_restart(tmp_path, save_after_s):
    chosen = settings(tmp_path, retention=retention(gap_s=0.0), save_after_s=save_after_s)

    async def script(service, calls):
        model = await step_after_a_gap(service, calls)
        # Killed between these two writes.
        late = service.request(model, 1, "optim_step", b"{}", service.holdings.models[model].tenant)
        await service.journal.write([accepted(late)])
        return model, late.id

    model, late = await killed(ScriptedModels(), chosen, script)
    after = ScriptedModels()
    async with serving(after, chosen) as (_, calls):
        assert "came after later requests" in (await asyncio.wait_for(calls.result(late), 60))["error"]
        await asyncio.wait_for(calls.result(await calls.optim_step(model, 3, lr=0.3)), 60)
        assert after.done[model] == [["create", 0], ["optim_step", 0.2], ["optim_step", 0.3]]


async def test_a_request_that_is_passed_while_it_is_written_down_fails(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path, retention=retention(gap_s=0.0))) as (service, calls):
        model = await calls.model(await calls.session())
        come, go = held(service, f"{model}:1")
        late = asyncio.create_task(calls.optim_step(model, 1, lr=0.1))
        await come.wait()
        step = await calls.optim_step(model, 2, lr=0.2)
        await asyncio.sleep(0.01)
        await service.clean_once()
        await calls.result(step)
        go.set()
        assert "came after later requests" in (await asyncio.wait_for(calls.result(await late), 60))["error"]
        assert models.done[model] == [["create", 0], ["optim_step", 0.2]]


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["deleted", "kept"])
async def test_a_checkpoint_that_changes_while_others_expire(tmp_path, meanwhile):
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())
        for seq, name in ((1, "a"), (2, "b")):
            saved = await calls.post("save_weights", model_id=model, seq_id=seq, path=name)
            await calls.result(saved.json()["request_id"])
        stored = service.holdings.checkpoints
        for path, record in list(stored.items()):
            stored[path] = replace(record, expires=1.0)
        expiring = asyncio.create_task(service.checkpoints.delete_expired())
        await asyncio.sleep(0)
        (other,) = stored.values()
        if meanwhile == "deleted":
            await service.checkpoints.delete(other)
        else:
            await service.checkpoints.set_ttl(other, 3600)
        await expiring
        assert [record.name for record in stored.values()] == ([] if meanwhile == "deleted" else ["b"])
        assert len(list((tmp_path / "weights").iterdir())) == len(stored)


# --- Models and sessions ----------------------------------------------------------------------------------------------


async def test_requests_that_wait_fail_when_their_model_is_unloaded(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())
        models.gate.clear()
        steps = [await calls.optim_step(model, seq) for seq in (1, 2, 3)]
        record = service.holdings.models[model]
        unloads = [asyncio.create_task(service.training.unload(record, "unloaded.")) for _ in range(2)]
        await asyncio.sleep(0)
        models.gate.set()
        for unload in unloads:
            await unload
            assert service.holdings.models[model].unloaded
            assert service.training.num_live == 0
        results = [await calls.result(step) for step in steps]
        assert results[0]["metrics"]["step"] == 1
        assert ["unloaded" in result["error"] for result in results[1:]] == [True, True]
        assert models.calls == [f"{model} create", f"{model} optim_step", f"{model} remove"]


async def test_a_request_whose_model_is_unloaded_while_it_is_written_down_fails(tmp_path):
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())
        come, go = held(service, f"{model}:1")
        step = asyncio.create_task(calls.optim_step(model, 1))
        await come.wait()
        await calls.post("unload_model", model_id=model)
        go.set()
        assert "unloaded" in (await asyncio.wait_for(calls.result(await step), 60))["error"]


async def test_a_request_of_an_unloaded_model_without_a_result_fails_after_a_restart(tmp_path):
    async def script(service, calls):
        model = await calls.model(await calls.session())
        await calls.post("unload_model", model_id=model)
        # It was being written down when the model was unloaded, and the server was killed before it had a result.
        late = service.request(model, 1, "optim_step", b"{}", service.holdings.models[model].tenant)
        await service.journal.write([accepted(late)])
        return late.id

    late = await killed(ScriptedModels(), settings(tmp_path), script)
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        assert "unloaded" in (await asyncio.wait_for(calls.result(late), 60))["error"]


async def test_a_session_that_is_ended_twice_at_once(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path, save_after_s=0.0)) as (service, calls):
        name = await calls.session()
        for number in range(2):
            model = await calls.model(name, number)
            await calls.result(await calls.optim_step(model, 1))
            asked = await calls.post(
                "save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=number
            )
            await calls.result(asked.json()["request_id"])
        session = service.holdings.sessions[name]
        models.gate.clear()
        await calls.optim_step(service.holdings.models_of(name)[0].id, 3)
        both = asyncio.gather(*(service.finish_session(session, "ended.") for _ in range(2)))
        # Both wait for the step.
        await asyncio.sleep(0.1)
        models.gate.set()
        await both
        assert models.done == {}
        assert not service.holdings.samplers
        assert not service.holdings.checkpoints
        assert not list((tmp_path / "weights").iterdir())
        assert not await service.journal.requests("1")


async def test_a_model_that_is_unloaded_while_it_cannot_be_created(tmp_path):
    models = ScriptedModels()

    def create(name, spec):
        assert models.gate.wait(20)
        raise RequestError("no room.")

    models.create = create
    async with serving(models, settings(tmp_path)) as (service, calls):
        name = await calls.session()
        models.gate.clear()
        model = await calls.model(name, wait=False)
        unload = asyncio.create_task(service.training.unload(service.holdings.models[model], "unloaded."))
        await asyncio.sleep(0)
        models.gate.set()
        await asyncio.wait_for(unload, 60)
        await service.finish_session(service.holdings.sessions[name], "ended.")
        assert service.holdings.models[model].unloaded
        assert service.training.num_live == 0
        assert await calls.session()


async def test_a_session_that_is_heard_of_while_another_expires(tmp_path):
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        first, second = [await calls.session(), await calls.session()]
        sessions = service.holdings.sessions
        for name in (first, second):
            sessions[name] = replace(sessions[name], seen=0.0)
        cleaning = asyncio.create_task(service.clean_once())
        await asyncio.sleep(0)
        await calls.post("session_heartbeat", session_id=second)
        await cleaning
        assert [sessions[name].finished for name in (first, second)] == [True, False]


@pytest.mark.parametrize("unloaded", [False, True], ids=["before its model", "before its requests"])
async def test_a_server_that_is_killed_while_a_session_ends_deletes_the_rest_later(tmp_path, unloaded):
    chosen = settings(tmp_path, save_after_s=0.0)

    async def script(service, calls):
        name = await calls.session()
        model = await calls.model(name)
        await calls.result(await calls.optim_step(model, 1))
        for seq, given in ((2, {"path": "kept"}), (3, {"sampling_session_seq_id": 0})):
            asked = await calls.post("save_weights_for_sampler", model_id=model, seq_id=seq, **given)
            await calls.result(asked.json()["request_id"])
        (sampler,) = service.holdings.samplers
        await calls.result(await calls.sample(sampler, 0))
        ended = replace(service.holdings.sessions[name], finished=True)
        await service.journal.write([service.holdings.put(ended)])
        if unloaded:
            await service.training.unload(service.holdings.models[model], "ended.")
        return model

    model = await killed(ScriptedModels(), chosen, script)
    after = ScriptedModels()
    async with serving(after, chosen) as (service, _):
        assert after.calls == []
        assert service.holdings.models[model].unloaded
        assert service.holdings.models[model].state is None
        (kept,) = service.holdings.checkpoints.values()
        assert kept.name == "kept"
        assert [path.name for path in (tmp_path / "weights").iterdir()] == [kept.folder]
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        assert journal.execute("select count(*) from requests").fetchone() == (0,)
        kinds = journal.execute("select kind, count(*) from records group by kind order by kind").fetchall()
    assert kinds == [("checkpoint", 1), ("model", 1), ("session", 1)]


async def test_a_server_that_is_killed_while_it_overwrites_a_checkpoint_has_one_of_both(tmp_path):
    """Whether the new one's record is on the disk or not, its folder is there, and nothing else."""
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())

        async def save(seq, **given):
            response = await calls.post("save_weights", model_id=model, seq_id=seq, path="best", **given)
            return await calls.result(response.json()["request_id"])

        await save(1)
        (first,) = (tmp_path / "weights").iterdir()
        apply, before = service.journal._apply, []

        def note(statements):
            before.append({path.name for path in (tmp_path / "weights").iterdir()})
            apply(statements)

        service.journal._apply = note
        await save(2, overwrite=True)
        # Until the last write, that of the new record, the folder of the old one is there.
        assert all(first.name in folders for folders in before)
        assert len(before[-1]) == 2
        while first.exists():  # noqa: ASYNC110 - it is deleted after the client has its result
            await asyncio.sleep(0.001)
