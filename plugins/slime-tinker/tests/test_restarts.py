"""What outlives a server that ends without notice, and what is deleted when."""

import asyncio
import json
import time

import numpy as np
import pytest
from scripted_models import ScriptedModels
from sdk_calls import killed, limits, retention, serving, settings

from slime_core.errors import ConfigError

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("save_after_s", [0.0, 1e9], ids=["saved", "repeated"])
async def test_no_acknowledged_step_is_lost(tmp_path, save_after_s):
    chosen = settings(tmp_path, save_after_s=save_after_s)
    models = ScriptedModels()

    async def script(service, calls):
        model = await calls.model(await calls.session(), seed=4)
        for seq in (1, 3, 5):
            await calls.forward_backward(model, seq, seq + 1)
            await calls.result(await calls.optim_step(model, seq + 1, lr=seq / 10))
        await calls.result(await calls.forward_backward(model, 7, 9))
        return model

    model = await killed(models, chosen, script)
    before = models.done[model]
    after = ScriptedModels()
    async with serving(after, chosen) as (_, calls):
        step = await calls.result(await calls.optim_step(model, 8, lr=0.9))
        assert step["metrics"]["step"] == 4
        assert after.done[model] == [*before, ["optim_step", 0.9]]
        # Results from before are there.
        assert (await calls.result(f"{model}:6"))["metrics"]["step"] == 3
    assert (f"{model} load" in after.calls) == (save_after_s == 0.0)


async def test_requests_without_a_result_run_after_the_restart(tmp_path):
    models = ScriptedModels()
    models.hold_samples = True

    async def script(service, calls):
        session = await calls.session()
        model = await calls.model(session)
        saved = await calls.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        sampler = (await calls.result(saved.json()["request_id"]))["sampling_session_id"]
        await calls.result(await calls.optim_step(model, 2))
        # 4 waits for 3, which the client sends to the next server.
        return model, await calls.optim_step(model, 4), await calls.sample(sampler, 0)

    model, step, sample = await killed(models, settings(tmp_path), script)
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        assert (await calls.fetch(step)).json()["type"] == "try_again"
        await calls.forward_backward(model, 3, 5)
        assert (await calls.result(step))["metrics"]["step"] == 2
        # The snapshot is from before the first step.
        tokens = (await calls.result(sample)).sequences[0].tokens
        assert np.frombuffer(tokens, np.int32).tolist() == [1]
        assert [call[0] for call in after.done[model]] == ["create", "optim_step", "forward_backward", "optim_step"]


async def test_a_state_that_was_not_written_is_computed_again(tmp_path):
    models = ScriptedModels()
    models.disk.clear()

    async def script(service, calls):
        model = await calls.model(await calls.session())
        step = await calls.optim_step(model, 1)
        assert (await calls.fetch(step)).json()["type"] == "try_again"
        while f"{model} save" not in models.calls:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.01)
        return model, step

    model, step = await killed(models, settings(tmp_path, save_after_s=0.0), script)
    models.disk.set()
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        assert (await calls.result(step))["metrics"]["step"] == 1
        assert [call[0] for call in after.done[model]] == ["create", "optim_step"]


async def test_a_request_that_ends_the_server_does_not_end_the_next(tmp_path):
    models = ScriptedModels()
    models.forward = lambda name, datums: 1 / 0

    found = []

    async def until_it_ends():
        async with serving(models, settings(tmp_path)) as (_, calls):
            model = await calls.model(await calls.session())
            found.append((model, await calls.forward_backward(model, 1, 5, forward_only=True)))
            await asyncio.sleep(20)

    with pytest.raises(ExceptionGroup) as ended:
        await until_it_ends()
    assert isinstance(ended.value.exceptions[0], ZeroDivisionError)
    ((model, request),) = found
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        result = await calls.result(request)
        assert "ended the server" in result["error"]
        assert result["category"] == "server"
        assert "metrics" in await calls.result(await calls.optim_step(model, 2))


async def test_a_failed_request_fails_again(tmp_path):
    async def script(service, calls):
        model = await calls.model(await calls.session())
        failed = await calls.forward_backward(model, 1, 99)
        await calls.result(failed)
        return model, failed

    model, failed = await killed(ScriptedModels(), settings(tmp_path), script)
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        assert "error" in await calls.result(failed)
        assert "metrics" in await calls.result(await calls.optim_step(model, 2))


async def test_a_server_that_ends_saves_everything(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1))
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        assert after.calls == [f"{model} load"]
        assert (await calls.result(await calls.optim_step(model, 2)))["metrics"]["step"] == 2


async def test_a_folder_with_models_of_another_kind_is_refused(tmp_path):
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        await calls.model(await calls.session())
    whole = ScriptedModels()
    whole.whole = True
    with pytest.raises(ConfigError, match=r"has LoRA models\. Start without --full-parameters"):
        async with serving(whole, settings(tmp_path)):
            pass


async def test_folders_that_nothing_refers_to_are_deleted(tmp_path):
    (tmp_path / "weights/half").mkdir(parents=True)
    async with serving(ScriptedModels(), settings(tmp_path)):
        assert not list((tmp_path / "weights").iterdir())


async def saved(calls, model, seq, name, **given):
    response = await calls.post("save_weights", model_id=model, seq_id=seq, path=name, **given)
    return await calls.result(response.json()["request_id"])


async def test_checkpoints_are_loaded_listed_expired_and_deleted(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (service, calls):
        session = await calls.session()
        model = await calls.model(session)
        await calls.result(await calls.optim_step(model, 1))
        path = (await saved(calls, model, 2, "first", ttl_seconds=3600))["path"]
        assert path == f"tinker://{model}/weights/first"
        assert "is there already" in (await saved(calls, model, 3, "first"))["error"]
        assert (await saved(calls, model, 4, "first", overwrite=True))["path"] == path
        assert "last part" in (await saved(calls, model, 5, "../first"))["error"]
        assert "ttl_seconds = 5" in (await saved(calls, model, 6, "short", ttl_seconds=5))["error"]
        loaded = await calls.post("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=False)
        other = (await calls.result(loaded.json()["request_id"]))["model_id"]
        assert models.done[other] == [["create", 0], ["optim_step", 0.5], "new optimizer"]
        await saved(calls, model, 7, "second", ttl_seconds=3600)
        listed = await calls.get(f"training_runs/{model}/checkpoints")
        assert [one["checkpoint_id"] for one in listed["checkpoints"]] == ["weights/second", "weights/first"]
        later = time.time() + 4000
        for record in list(service.holdings.checkpoints.values()):
            if record.name == "second":
                assert 3500 < record.expires - time.time() < 3700
        folders = {record.name: record.folder for record in service.holdings.checkpoints.values()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("slime_tinker.checkpoints.time.time", lambda: later)
            await service.checkpoints.delete_expired()
        left = (await calls.get("checkpoints"))["checkpoints"]
        assert [one["checkpoint_id"] for one in left] == ["weights/first"]
        assert not (tmp_path / "weights" / folders["second"]).exists()
        deleted = await calls.client.delete(f"training_runs/{model}/checkpoints/weights/first")
        assert deleted.status_code == 200
        assert not (tmp_path / "weights" / folders["first"]).exists()
        assert (await calls.get("checkpoints"))["checkpoints"] == []


async def test_a_session_that_ends_leaves_what_was_saved_under_a_name(tmp_path):
    models = ScriptedModels()
    chosen = settings(tmp_path, retention=retention(session_s=0.0), save_after_s=0.0)
    async with serving(models, chosen) as (service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1))
        await saved(calls, model, 2, "kept")
        snapshot = await calls.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0)
        await calls.result(snapshot.json()["request_id"])
        waiting = await calls.optim_step(model, 9)
        await service.clean_once()
        assert models.done == {}
        assert (await calls.fetch(waiting)).status_code == 404
        assert [record.name for record in service.holdings.checkpoints.values()] == ["kept"]
        (folder,) = (tmp_path / "weights").iterdir()
        assert json.loads((folder / "done.json").read_text())[-1] == ["optim_step", 0.5]
        assert (await calls.post("optim_step", model_id=model, seq_id=4, adam_params={})).status_code == 410
        assert not service.holdings.samplers


async def test_old_snapshots_without_a_name_are_deleted(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path, limits=limits(max_snapshots=2))) as (_, calls):
        model = await calls.model(await calls.session())
        samplers = []
        for seq in range(1, 5):
            asked = await calls.post(
                "save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq
            )
            samplers.append((await calls.result(asked.json()["request_id"]))["sampling_session_id"])
        assert len(list((tmp_path / "weights").iterdir())) == 2
        assert "its weights are deleted" in (await calls.result(await calls.sample(samplers[0], 0)))["error"]
        assert (await calls.result(await calls.sample(samplers[-1], 0))).sequences
