"""What a restart repeats: a model has all that was acknowledged, or is not served. The others are, and results stay."""

import asyncio
import sqlite3

import pytest
from scripted_models import ScriptedModels
from sdk_calls import killed, serving, settings

import slime_tinker.journal
from slime_core.errors import EngineError, StorageError
from slime_tinker.errors import SkippedStep

pytestmark = pytest.mark.asyncio


class OneModel(ScriptedModels):
    """One set of weights, whatever the model's name."""

    whole = True
    max_models = 1
    max_weights = 1

    def create(self, name, spec):
        super().create("weights", spec)

    def load(self, name, spec, folder, *, optimizer):
        super().load("weights", spec, folder, optimizer=optimizer)

    def remove(self, name):
        pass

    def forward_backward(self, name, datums, loss):
        return super().forward_backward("weights", datums, loss)

    def optim_step(self, name, adam):
        return super().optim_step("weights", adam)

    def save(self, name, folder, *, optimizer):
        return super().save("weights", folder, optimizer=optimizer)


async def three_steps(service, calls):
    model = await calls.model(await calls.session())
    for seq in (1, 2, 3):
        await calls.result(await calls.optim_step(model, seq, lr=seq / 10))
    return model


def failing_once(models, error, after):
    """Its optim_step raises the error after so many calls."""
    step, left = models.optim_step, [after]

    def optim_step(name, adam):
        left[0] -= 1
        if left[0] == -1:
            raise error
        return step(name, adam)

    models.optim_step = optim_step
    return models


async def test_a_model_whose_steps_cannot_be_repeated_is_not_served_until_they_can(tmp_path, capsys):
    chosen = settings(tmp_path)
    models = ScriptedModels()
    model = await killed(models, chosen, three_steps)
    async with serving(failing_once(ScriptedModels(), EngineError("a rank was lost"), 1), chosen) as (service, calls):
        other = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(other, 1))
        refused = await calls.post("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 0.9})
        assert refused.status_code == 410
        assert "could not be restored" in refused.json()["detail"]
        assert (await calls.result(f"{model}:2"))["metrics"]["step"] == 2
        assert service.training.num_live == 2
    assert (
        "request 2 (optim_step), which succeeded before, fails when it is repeated: a rank was lost"
        in capsys.readouterr().err
    )
    last = ScriptedModels()
    async with serving(last, chosen) as (_, calls):
        assert (await calls.result(await calls.optim_step(model, 4, lr=0.9)))["metrics"]["step"] == 4
        assert last.done[model][:-1] == models.done[model]


async def test_a_first_request_that_cannot_be_repeated_unloads_no_model(tmp_path):
    chosen = settings(tmp_path)
    model = await killed(ScriptedModels(), chosen, three_steps)
    broken = ScriptedModels()

    def create(name, spec):
        raise EngineError("a rank was lost")

    broken.create = create
    async with serving(broken, chosen) as (service, calls):
        refused = await calls.post("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 0.9})
        # It may have come before the server knew.
        following = 4 if refused.status_code == 410 else 5
        if following == 5:
            assert "could not be restored" in (await calls.result(f"{model}:4"))["error"]
        assert "error" not in await calls.result(f"{model}:0")
        assert not service.holdings.models[model].unloaded
    last = ScriptedModels()
    async with serving(last, chosen) as (_, calls):
        assert (await calls.result(await calls.optim_step(model, following)))["metrics"]["step"] == 4


async def test_an_error_that_ends_the_server_in_a_repeated_request_ends_it_once(tmp_path):
    chosen = settings(tmp_path)
    model = await killed(ScriptedModels(), chosen, three_steps)
    with pytest.raises(ExceptionGroup) as ended:
        async with serving(failing_once(ScriptedModels(), RuntimeError("out of memory"), 1), chosen):
            await asyncio.sleep(60)
    assert ended.group_contains(RuntimeError, match="out of memory")
    async with serving(ScriptedModels(), chosen) as (_, calls):
        other = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(other, 1))
        refused = await calls.post("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 0.9})
        assert refused.status_code == 410


async def test_a_model_that_is_not_restored_keeps_its_place(tmp_path):
    """Else two tenants would have one set of weights once it is."""
    chosen = settings(tmp_path)
    async with serving(OneModel(), chosen) as (service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1, lr=0.1))
    state = service.checkpoints.folder_of(service.holdings.models[model].state) / "done.json"
    content = state.read_text()
    state.unlink()
    async with serving(OneModel(), chosen) as (_, calls):
        body = {"model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4, "seed": 0}}
        refused = await calls.post("create_model", session_id=await calls.session(), **body)
        assert refused.status_code != 200
        # Until its client lets it go.
        state.write_text(content)
        await calls.post("unload_model", model_id=model)
        created = refused
        while created.status_code != 200:
            created = await calls.post("create_model", session_id=await calls.session(), **body)


async def test_every_checkpoint_that_a_restart_loads_is_kept(tmp_path):
    chosen = settings(tmp_path, save_after_s=0.0)
    models = ScriptedModels()

    async def script(service, calls):
        session = await calls.session()
        first = await calls.model(session)
        await calls.save(first, 1, "one")
        await calls.result(await calls.optim_step(first, 2))
        await calls.save(first, 3, "two")
        models.full = True
        paths = [f"tinker://{first}/weights/{name}" for name in ("one", "two")]
        begun = await calls.post("load_weights", session_id=session, model_seq_id=2, path=paths[0], optimizer=True)
        await calls.result(begun.json()["request_id"])
        model = begun.json()["model_id"]
        await calls.load(model, 1, paths[1])
        await calls.result(await calls.optim_step(model, 2, lr=0.3))
        for name in ("one", "two"):
            path = f"training_runs/{first}/checkpoints/weights/{name}"
            assert (await calls.client.delete(path, headers={"x-api-key": "k"})).status_code == 409
        models.full = False
        await calls.result(await calls.optim_step(model, 3, lr=0.4))
        return model

    model = await killed(models, chosen, script)
    after = ScriptedModels()
    async with serving(after, chosen) as (_, calls):
        await calls.result(await calls.optim_step(model, 4))
        assert after.done[model][:-1] == models.done[model]


async def test_results_that_clients_have_stay_when_a_model_is_unloaded_during_the_restart(tmp_path):
    chosen = settings(tmp_path)
    model = await killed(ScriptedModels(), chosen, three_steps)
    after = ScriptedModels()
    after.gate.clear()
    async with serving(after, chosen) as (_, calls):
        unloading = asyncio.create_task(calls.post("unload_model", model_id=model))
        await asyncio.sleep(0.1)
        after.gate.set()
        await unloading
        for seq in (1, 2, 3):
            assert (await calls.result(f"{model}:{seq}"))["metrics"]["step"] == seq


async def test_a_result_that_the_journal_cannot_hold_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(slime_tinker.journal, "AGAIN_S", 0.05)
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        session = await calls.session()
        model = await calls.model(session)
        sampler = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        # In place of 1,000,000,000.
        service.journal._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 5_000)
        large = await calls.sample(sampler.json()["sampling_session_id"], 0, num_samples=1024)
        step = await asyncio.wait_for(calls.result(await calls.optim_step(model, 1)), 10)
        assert step["metrics"]["step"] == 1
        failed = await asyncio.wait_for(calls.result(large), 10)
        assert "more than the server can keep" in failed["error"]


async def test_a_request_whose_result_would_be_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_tinker.sampling.MAX_RESULT_BYTES", 1000)
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        session = await calls.session()
        sampler = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        failed = await calls.result(
            await calls.sample(sampler.json()["sampling_session_id"], 0, num_samples=63, topk_sample_logprobs=1)
        )
        assert "the result may have 1,008 bytes, more than 1,000" in failed["error"]


async def test_a_deletion_that_cannot_be_written_can_be_repeated(tmp_path, monkeypatch):
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())
        await calls.save(model, 1, "kept")
        path, write = f"training_runs/{model}/checkpoints/weights/kept", service.journal.write

        async def fails(statements, *, lasting=False):
            assert not lasting
            raise StorageError("the disk is full")

        monkeypatch.setattr(service.journal, "write", fails)
        assert (await calls.client.delete(path, headers={"x-api-key": "k"})).status_code >= 500
        monkeypatch.setattr(service.journal, "write", write)
        assert (await calls.client.delete(path, headers={"x-api-key": "k"})).status_code == 200


async def test_a_model_of_all_weights_is_saved_after_a_skipped_step(tmp_path):
    models = OneModel()
    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.forward_backward(model, 1, 5))
        failing_once(models, SkippedStep("optim_step: the gradient is not finite"), 0)
        assert "not finite" in (await calls.result(await calls.optim_step(model, 2)))["error"]
        assert (await calls.save(model, 3, "kept"))["path"] == f"tinker://{model}/weights/kept"
