"""A disk without room: for states, for what tenants save, and for the journal. The server serves on, and loses nothing."""

import asyncio
import errno
import io
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
from scripted_models import ScriptedModels
from sdk_calls import killed, serving, settings

import slime_tinker.journal
from slime_core.errors import StorageError, TrainingError

pytestmark = pytest.mark.asyncio

CREATED = ["create", 0]


class FullJournal:
    """Of a service: `full` while it cannot be written."""

    def __init__(self, service, monkeypatch):
        self.full = False
        self.refused = 0
        self._apply = service.journal._apply
        monkeypatch.setattr(slime_tinker.journal, "AGAIN_S", 0.01)
        monkeypatch.setattr(service.journal, "_apply", self.apply)

    def apply(self, statements):
        if self.full:
            self.refused += 1
            raise StorageError("no room.")
        self._apply(statements)

    async def has_refused(self, times):
        while self.refused < times:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.01)


def stored(tmp_path, record):
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        (content,) = journal.execute("select content from records where id = ?", (record,)).fetchone()
    return content


def folders(tmp_path):
    return {path.name for path in (tmp_path / "weights").iterdir()}


# --- States -----------------------------------------------------------------------------------------------------------


async def test_steps_are_acknowledged_and_repeated_though_no_state_can_be_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("slime_tinker.model_states.SAVING_SHARE", 0.0)
    chosen = settings(tmp_path, save_after_s=0.0)
    models = ScriptedModels()

    async def script(service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1, lr=0.1))
        (state,) = folders(tmp_path)
        models.full = True
        for seq in (2, 3):
            assert (await calls.result(await calls.optim_step(model, seq, lr=seq / 10)))["metrics"]["step"] == seq
        # The earlier one, and nothing of those that were not written.
        assert folders(tmp_path) == {state}
        assert service.holdings.models[model].applied == 1
        return model

    model = await killed(models, chosen, script)
    assert "its state is not saved, and is tried again later" in capsys.readouterr().err
    after = ScriptedModels()
    after.full = True
    expected = [CREATED, ["optim_step", 0.1], ["optim_step", 0.2], ["optim_step", 0.3]]
    async with serving(after, chosen) as (service, calls):
        assert (await calls.result(await calls.optim_step(model, 4, lr=0.4)))["metrics"]["step"] == 4
        assert after.done[model] == [*expected, ["optim_step", 0.4]]
        after.full = False
        await calls.result(await calls.optim_step(model, 5, lr=0.5))
        # Which deletes the earlier state.
        await service.training._live[model].rest
        assert service.holdings.models[model].applied == 5
        assert folders(tmp_path) == {service.holdings.models[model].state}


async def test_a_state_is_not_tried_at_every_step(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path, save_after_s=3600.0)) as (service, calls):
        model = await calls.model(await calls.session())
        live = service.training._live[model]
        models.full = True
        live.unsaved_s = 1e6
        for seq in (1, 2, 3):
            await calls.result(await calls.optim_step(model, seq))
        assert models.calls.count(f"{model} save") == 1
        # It is still due.
        assert live.unsaved_s >= 1e6
        models.full, live.retry_at = False, time.monotonic()
        await calls.result(await calls.optim_step(model, 4))
        assert service.holdings.models[model].applied == 4


async def test_a_log_on_the_same_disk_ends_nothing(tmp_path, monkeypatch):
    class FullLog(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    models = ScriptedModels()
    async with serving(models, settings(tmp_path, save_after_s=0.0)) as (_, calls):
        model = await calls.model(await calls.session())
        models.full = True
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", FullLog())
            assert (await calls.result(await calls.optim_step(model, 1)))["metrics"]["step"] == 1
            assert (await calls.save(model, 2, "best"))["category"] == "server"


async def test_a_tenant_hears_that_a_checkpoint_was_not_saved(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session())
        models.full = True
        failed = await calls.save(model, 1, "best")
        assert failed["category"] == "server"
        assert "nothing was saved" in failed["error"]
        assert str(tmp_path) not in failed["error"]
        assert folders(tmp_path) == set()
        assert (await calls.get("checkpoints"))["checkpoints"] == []
        models.full = False
        assert (await calls.save(model, 2, "best"))["path"] == f"tinker://{model}/weights/best"


async def test_a_checkpoint_stays_until_the_state_of_what_has_loaded_it_is_saved(tmp_path):
    chosen = settings(tmp_path)
    models = ScriptedModels()
    expected = [CREATED, ["optim_step", 0.1], ["optim_step", 0.3]]

    async def script(service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1, lr=0.1))
        path = (await calls.save(model, 2, "first"))["path"]
        await calls.result(await calls.optim_step(model, 3, lr=0.2))
        models.full = True
        assert (await calls.load(model, 4, path))["type"] == "load_weights"
        await calls.result(await calls.optim_step(model, 5, lr=0.3))
        assert models.done[model] == expected
        record = service.holdings.checkpoints[path]
        deleted = await calls.client.delete(f"training_runs/{model}/checkpoints/weights/first")
        assert deleted.status_code == 409
        service.holdings.checkpoints[path] = replace(record, expires=1.0)
        await service.checkpoints.delete_expired()
        assert path in service.holdings.checkpoints
        assert "has loaded it" in (await calls.save(model, 6, "first", overwrite=True))["error"]
        return model

    model = await killed(models, chosen, script)
    after = ScriptedModels()
    async with serving(after, chosen) as (service, calls):
        await calls.result(await calls.optim_step(model, 7, lr=0.4))
        await service.training._live[model].rest
        assert after.done[model] == [*expected, ["optim_step", 0.4]]
        deleted = await calls.client.delete(f"training_runs/{model}/checkpoints/weights/first")
        assert deleted.status_code == 200
        assert folders(tmp_path) == {service.holdings.models[model].state}


# --- The end ----------------------------------------------------------------------------------------------------------


async def test_a_model_that_cannot_be_saved_keeps_no_other_from_it(tmp_path, capsys):
    models = ScriptedModels()
    save = models.save

    def fails(name, folder, *, optimizer):
        if name.endswith(":0"):
            raise TrainingError("lost.")
        return save(name, folder, optimizer=optimizer)

    models.save = fails
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        names = [await calls.model(session, number) for number in range(2)]
        for name in names:
            await calls.result(await calls.optim_step(name, 1))
    assert f"{names[0]}: its state is not saved; the next start repeats what it lacks: lost." in capsys.readouterr().err
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        for name in names:
            assert (await calls.result(await calls.optim_step(name, 2)))["metrics"]["step"] == 2
    assert f"{names[0]} load" not in after.calls
    assert f"{names[1]} load" in after.calls


async def test_gradients_of_a_request_that_failed_are_in_no_state(tmp_path):
    models = ScriptedModels()
    run = models.forward_backward

    def fails(name, datums, loss):
        run(name, datums, loss)
        raise TrainingError("no memory.")

    async with serving(models, settings(tmp_path)) as (_, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1))
        models.forward_backward = fails
        assert "no memory" in (await calls.result(await calls.forward_backward(model, 2, 5)))["error"]
    assert f"{model} save" not in models.calls


@pytest.mark.parametrize("kind", ["optim_step", "load_weights"])
async def test_a_request_that_runs_while_the_server_ends_is_run_once(tmp_path, kind):
    models = ScriptedModels()
    begun, load, step = threading.Event(), models.load, models.optim_step

    def slow(*args, **given):
        begun.set()
        assert models.gate.wait(20)
        load(*args, **given)

    def slow_step(*args):
        begun.set()
        return step(*args)

    models.load, models.optim_step = slow, slow_step
    async with serving(models, settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1, lr=0.1))
        path = (await calls.save(model, 2, "first"))["path"]
        before = len(models.calls)
        models.gate.clear()
        begun.clear()
        if kind == "optim_step":
            request = await calls.optim_step(model, 3, lr=0.2)
        else:
            response = await calls.post("load_weights", model_id=model, seq_id=3, path=path, optimizer=True)
            request = response.json()["request_id"]
        await asyncio.to_thread(begun.wait, 20)
        end = service.journal.end

        def opened():
            # The same step of the loop cancels the work.
            models.gate.set()
            end()

        service.journal.end = opened
    assert models.calls[before:] == [f"{model} {'optim_step' if kind == 'optim_step' else 'load'}"]
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        assert "error" not in await calls.result(request)
        assert [call[0] for call in after.done[model]].count("optim_step") == (2 if kind == "optim_step" else 1)


# --- The journal ------------------------------------------------------------------------------------------------------


async def test_results_wait_for_the_journal_and_new_requests_are_refused(tmp_path, monkeypatch, capsys):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (service, calls):
        journal = FullJournal(service, monkeypatch)
        session = await calls.session()
        model = await calls.model(session)
        models.gate.clear()
        step = await calls.optim_step(model, 1)
        journal.full = True
        models.gate.set()
        await journal.has_refused(1)
        assert (await calls.fetch(step)).json()["type"] == "try_again"
        refused = await calls.post("optim_step", model_id=model, seq_id=2, adam_params={})
        assert refused.status_code == 500
        other = {"session_id": session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 4}}
        assert (await calls.post("create_model", **other)).status_code == 500
        assert service.training.num_live == 1
        assert (await calls.post(f"sessions/{session}/finish")).status_code == 500
        journal.full = False
        assert (await calls.result(step))["metrics"]["step"] == 1
        # Sent again, they are served.
        assert (await calls.result(await calls.optim_step(model, 2)))["metrics"]["step"] == 2
        assert await calls.model(session, 1)
        await calls.post(f"sessions/{session}/finish")
        assert models.done == {}
    noted = capsys.readouterr().err
    assert noted.count("New requests are refused, and results wait") == 1
    assert "the journal is written again" in noted


async def test_what_is_cleaned_up_is_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("slime_tinker.service.CLEANING_S", 0.01)
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        journal = FullJournal(service, monkeypatch)
        session = await calls.session()
        service.holdings.sessions[session] = replace(service.holdings.sessions[session], seen=0.0)
        journal.full = True
        await journal.has_refused(2)
        journal.full = False
        while '"finished": true' not in stored(tmp_path, session):  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.01)
    assert "what has expired is not deleted yet: no room." in capsys.readouterr().err


async def test_a_server_ends_though_results_cannot_be_written(tmp_path, monkeypatch, capsys):
    models = ScriptedModels()
    async with asyncio.timeout(20), serving(models, settings(tmp_path)) as (service, calls):
        journal = FullJournal(service, monkeypatch)
        model = await calls.model(await calls.session())
        models.gate.clear()
        step = await calls.optim_step(model, 1)
        journal.full = True
        models.gate.set()
        await journal.has_refused(1)
        assert (await calls.fetch(step)).json()["type"] == "try_again"
    assert "results are not written, and begin again with the next start" in capsys.readouterr().err
    after = ScriptedModels()
    async with serving(after, settings(tmp_path)) as (_, calls):
        assert (await calls.result(step))["metrics"]["step"] == 1


async def test_a_write_that_lasts_is_before_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(slime_tinker.journal, "AGAIN_S", 60.0)
    journal = slime_tinker.journal.Journal(tmp_path / "journal")
    apply, full, order = journal._apply, True, []

    def noted(statements):
        if full:
            raise StorageError("no room.")
        order.append([statement.values[0] for statement in statements])
        apply(statements)

    monkeypatch.setattr(journal, "_apply", noted)

    def put(name):
        return [slime_tinker.journal.Statement("insert into records values ('a', ?, '')", (name,))]

    lasting = asyncio.create_task(journal.write(put("first"), lasting=True))
    for name in ("second", "third"):
        with pytest.raises(StorageError):
            await journal.write(put(name))
    full = False
    # Does not wait for the next try.
    await asyncio.wait_for(journal.write(put("fourth")), 60)
    await lasting
    assert order == [["first", "fourth"]]
    await journal.close()
