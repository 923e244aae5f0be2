"""A server that many tenants use for weeks: what one of them sends, deletes or loses leaves the others alone, and no memory or
disk behind."""

import asyncio
import sqlite3
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from scripted_models import ScriptedModels
from sdk_calls import killed, limits, retention, serving, settings, two_tenants

from slime_core.errors import EngineError, ModelError, StorageError, TrainingError
from slime_core.types.completion import SamplingParams
from slime_tinker.access import Access
from slime_tinker.admission import Admission
from slime_tinker.errors import RequestError
from slime_tinker.sampler_weights import OpenWeights
from slime_tinker.session_adapters import SessionAdapters

pytestmark = pytest.mark.asyncio


# --- Memory and disk --------------------------------------------------------------------------------------------------


def rows(tmp_path):
    """Seq ids of the requests in the journal, and of those with their data."""
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        found = journal.execute("select seq, body is not null from requests order by seq").fetchall()
    return [seq for seq, _ in found], [seq for seq, has_body in found if has_body]


async def test_requests_that_no_restart_repeats_leave_nothing(tmp_path):
    chosen = settings(tmp_path, retention=retention(result_s=0.0))

    async def script(service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1))
        for seq in (2, 3, 4):
            await calls.result(await calls.forward_backward(model, seq, 5, forward_only=True))
        await calls.save(model, 5, "kept")
        for seq in (6, 7):
            await calls.result(await calls.forward_backward(model, seq, 99))
        await service.clean_once()
        return model

    model = await killed(ScriptedModels(), chosen, script)
    # What is repeated, and the last that has run, from which a restart counts; failed ones count as well.
    assert rows(tmp_path) == ([0, 1, 5, 6, 7], [0, 1])
    after = ScriptedModels()
    async with serving(after, chosen) as (_, calls):
        step = await asyncio.wait_for(calls.result(await calls.optim_step(model, 8)), 60)
        assert step["metrics"]["step"] == 2
        assert [call[0] for call in after.done[model]] == ["create", "optim_step", "optim_step"]


async def test_requests_that_wait_have_a_limit_in_bytes(tmp_path):
    models = ScriptedModels()
    keys, one, two = two_tenants()
    chosen = settings(tmp_path, limits=limits(max_pending_bytes=60))
    async with serving(models, chosen, lambda: keys) as (_, calls):
        calls.key = one
        model = await calls.model(await calls.session())
        calls.key = two
        other = await calls.model(await calls.session())
        calls.key = one
        models.gate.clear()
        steps = [await calls.optim_step(model, 1)]
        refused = await calls.post("optim_step", model_id=model, seq_id=2, adam_params={})
        assert refused.status_code == 429
        assert "60 bytes" in refused.json()["detail"]
        calls.key = two
        steps.append(await calls.optim_step(other, 1))
        models.gate.set()
        await calls.result(steps[1])
        calls.key = one
        await calls.result(steps[0])
        assert "metrics" in await calls.result(await calls.optim_step(model, 2))


async def test_metadata_has_a_limit(tmp_path):
    async with serving(ScriptedModels(), settings(tmp_path, limits=limits(max_metadata_bytes=50))) as (_, calls):
        large = {"user_metadata": {"note": "x" * 50}}
        refused = [await calls.post("create_session", tags=[], sdk_version="0.38.0", **large)]
        session = await calls.session()
        model = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        refused.append(await calls.post("create_model", **model, **large))
        assert [response.status_code for response in refused] == [400, 400]
        name = await calls.model(session)
        failed = await calls.save(name, 1, "best", **large)
        assert "user_metadata: 62 bytes as JSON, and there may be 50" in failed["error"]


# --- Turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["loads", "is unloaded"])
async def test_who_loads_what_is_being_written_keeps_no_other_from_the_trainers(tmp_path, then):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        slow, other = await calls.model(session), await calls.model(session, 1)
        models.disk.clear()
        saved = await calls.post("save_weights", model_id=slow, seq_id=1, path="slow")
        step = await calls.optim_step(slow, 2)
        loading = asyncio.create_task(calls.load(slow, 3, f"tinker://{slow}/weights/slow"))
        last = await calls.optim_step(slow, 4, lr=0.7)
        for seq in (1, 2):
            done = await asyncio.wait_for(calls.result(await calls.optim_step(other, seq)), 60)
            assert done["metrics"]["step"] == seq
        unload = None
        if then == "is unloaded":
            unload = asyncio.create_task(calls.post("unload_model", model_id=slow))
            await asyncio.sleep(0.05)
        models.disk.set()
        assert "path" in await calls.result(saved.json()["request_id"])
        assert (await calls.result(step))["metrics"]["step"] == 1
        if unload is None:
            assert (await loading)["type"] == "load_weights"
            assert (await calls.result(last))["metrics"]["step"] == 1
            assert models.done[slow] == [["create", 0], ["optim_step", 0.7]]
        else:
            await unload
            assert "unloaded" in (await loading)["error"]
            assert "unloaded" in (await calls.result(last))["error"]


# --- Clients that go --------------------------------------------------------------------------------------------------


class Connection:
    """An ASGI client that has sent these messages."""

    def __init__(self, *messages):
        self.messages = list(messages)
        self.sent = []

    async def receive(self):
        return self.messages.pop(0)

    async def send(self, message):
        self.sent.append(message)

    async def call(self, access):
        await access({"type": "http", "headers": [], "path": "/"}, self.receive, self.send)
        return self.sent[0]["status"] if self.sent else None


def part(body, *, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_that_is_cut_short_is_no_request():
    """Half of a protobuf message may be one too."""
    handled = []

    async def app(scope, receive, send):
        handled.append(await receive())

    access = Access(app, None, max_body_bytes=100, max_held_bytes=100)
    assert await Connection(part(b"half", more=True), {"type": "http.disconnect"}).call(access) is None
    assert handled == []
    assert not access._held


async def test_bodies_that_are_being_received_have_a_limit_in_bytes():
    inside, may_end, handled = asyncio.Event(), asyncio.Event(), []

    async def app(scope, receive, send):
        handled.append((await receive())["body"])
        inside.set()
        await may_end.wait()

    access = Access(app, None, max_body_bytes=100, max_held_bytes=8)
    # One is received whatever it has.
    first = asyncio.create_task(Connection(part(b"12345", more=True), part(b"67890")).call(access))
    await inside.wait()
    assert await asyncio.wait_for(Connection(part(b"1")).call(access), 60) == 429
    may_end.set()
    await first
    await Connection(part(b"1")).call(access)
    assert handled == [b"1234567890", b"1"]
    assert not access._held


async def test_keys_that_cannot_be_read_are_tried_again_by_clients(capsys):
    def unreadable():
        raise StorageError("keys.json: too many open files.")

    access = Access(Connection, unreadable, max_body_bytes=1, max_held_bytes=1)
    assert await Connection().call(access) == 503
    assert "too many open files" in capsys.readouterr().err


async def test_a_session_that_ends_does_not_wait_for_its_samples(tmp_path):
    models = ScriptedModels()
    models.hold_samples = True
    async with serving(models, settings(tmp_path)) as (service, calls):
        session = await calls.session()
        sampler = await calls.snapshot(await calls.model(session), 1, 0)
        request = await calls.sample(sampler, 0)
        await asyncio.to_thread(models.has_waiting.wait, 20)
        await asyncio.wait_for(calls.post(f"sessions/{session}/finish"), 60)
        assert models.waiting[0].cancelled()
        assert request not in service.futures
        assert (models.open, models.done) == (0, {})
        assert not service.holdings.samplers


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_sample_whose_prompt_is_not_scored_ends(tmp_path, how):
    models = ScriptedModels()
    models.hold_samples = True
    scoring, scores = threading.Event(), Future()

    def prompt_scores(weights, prompt, top_k):
        scoring.set()
        return scores

    models.prompt_scores = prompt_scores
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        created = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        request = await calls.sample(created.json()["sampling_session_id"], 0, prompt_logprobs=True)
        await asyncio.to_thread(scoring.wait, 20)
        if how == "failed":
            scores.set_exception(EngineError("lost."))
        else:
            await calls.post("cancel_future", request_id=request)
        assert "error" in await calls.result(request)
        await asyncio.sleep(0)
        assert models.waiting[0].cancelled()


# --- Restarts ---------------------------------------------------------------------------------------------------------


async def test_gradients_that_a_skipped_step_dropped_are_dropped_again(tmp_path):
    def scripted():
        models = ScriptedModels()
        step = models.optim_step

        def skips(name, adam):
            if adam.lr == 9.0:
                models._note(name, "dropped")
                raise RequestError("optim_step: the gradient is not finite.")
            return step(name, adam)

        models.optim_step = skips
        return models

    models = scripted()

    async def script(service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.forward_backward(model, 1, 5))
        assert "not finite" in (await calls.result(await calls.optim_step(model, 2, lr=9.0)))["error"]
        await calls.result(await calls.forward_backward(model, 3, 6))
        await calls.result(await calls.optim_step(model, 4, lr=0.1))
        return model

    model = await killed(models, settings(tmp_path), script)
    after = scripted()
    async with serving(after, settings(tmp_path)) as (_, calls):
        assert (await calls.result(await calls.optim_step(model, 5, lr=0.2)))["metrics"]["step"] == 2
        assert after.done[model] == [*models.done[model], ["optim_step", 0.2]]
        # Its result is still the first one.
        assert "not finite" in (await calls.result(f"{model}:2"))["error"]


async def test_a_state_that_cannot_be_loaded_keeps_no_other_model_away(tmp_path, capsys):
    chosen = settings(tmp_path)
    async with serving(ScriptedModels(), chosen) as (service, calls):
        session = await calls.session()
        names = [await calls.model(session, number) for number in range(2)]
        for name in names:
            await calls.result(await calls.optim_step(name, 1))
    damaged = tmp_path / "weights" / service.holdings.models[names[0]].state / "done.json"
    content = damaged.read_text()
    damaged.unlink()

    async def script(service, calls):
        assert (await calls.result(await calls.optim_step(names[1], 2)))["metrics"]["step"] == 2
        refused = await calls.post("optim_step", model_id=names[0], seq_id=2, adam_params={})
        assert refused.status_code == 410
        assert "could not be restored after a restart" in refused.json()["detail"]

    await killed(ScriptedModels(), chosen, script)
    assert f"{names[0]}: it is not served, since its saved state cannot be loaded" in capsys.readouterr().err
    # The disk is back.
    damaged.write_text(content)
    after = ScriptedModels()
    async with serving(after, chosen) as (_, calls):
        assert (await calls.result(await calls.optim_step(names[0], 2)))["metrics"]["step"] == 2
    damaged = tmp_path / "weights" / service.holdings.models[names[1]].state
    async with serving(ScriptedModels(), chosen) as (service, calls):
        await calls.post(f"sessions/{session}/finish")
        assert not list((tmp_path / "weights").iterdir())


async def test_results_from_before_a_restart_are_kept_as_long_as_others(tmp_path):
    async def script(service, calls):
        model = await calls.model(await calls.session())
        await calls.result(await calls.optim_step(model, 1))
        await calls.result(await calls.forward_backward(model, 2, 5, forward_only=True))
        await calls.save(model, 3, "last")
        return model

    model = await killed(ScriptedModels(), settings(tmp_path), script)
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        # The server was down for long.
        journal.execute("update requests set done = done - 100000")
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        await service.clean_once()
        assert (await calls.result(f"{model}:2")).metrics
        service.started -= 4000
        await service.clean_once()
        assert (await calls.fetch(f"{model}:2")).status_code == 404


# --- Weights for sampling ---------------------------------------------------------------------------------------------


async def test_who_has_many_requests_keeps_no_other_tenant_from_the_engines(tmp_path):
    """Those that wait for a place hold no room for weights."""
    models = ScriptedModels()
    models.hold_samples = True
    keys, one, two = two_tenants()
    async with serving(models, settings(tmp_path, sampling_places=1), lambda: keys) as (service, calls):
        samplers = {}
        for key, number in ((one, 2), (two, 1)):
            calls.key = key
            model = await calls.model(await calls.session())
            samplers[key] = [await calls.snapshot(model, 1 + place, place) for place in range(number)]
        calls.key = one
        requests = [await calls.sample(samplers[one][seq % 2], seq) for seq in range(6)]
        await asyncio.to_thread(models.has_waiting.wait, 20)
        calls.key = two
        other = await calls.sample(samplers[two][0], 0)
        # The one that runs ends, and the next one is the other tenant's.
        for _ in range(2):
            models.has_waiting.clear()
            models.waiting.pop().set_result(completions(models))
            await asyncio.to_thread(models.has_waiting.wait, 20)
        await asyncio.wait_for(calls.result(other), 60)
        assert sum(request in service.futures for request in requests) == 5


def completions(models):
    models.hold_samples = False
    found = models.start_sampling(None, [1], SamplingParams(max_new_tokens=1), [0]).result()
    models.hold_samples = True
    return found


async def test_a_snapshot_that_is_deleted_while_a_sample_waits_for_it_is_named(tmp_path):
    models = ScriptedModels()
    models.max_weights = 1
    models.hold_samples = True
    async with serving(models, settings(tmp_path, limits=limits(max_snapshots=2))) as (_, calls):
        model = await calls.model(await calls.session())
        samplers = [await calls.snapshot(model, 1 + number, number) for number in range(2)]
        running = await calls.sample(samplers[1], 0)
        await asyncio.to_thread(models.has_waiting.wait, 20)
        waiting = await calls.sample(samplers[0], 0)
        await asyncio.sleep(0.05)
        await calls.snapshot(model, 3, 2)
        models.hold_samples = False
        models.waiting.pop().set_result(completions(models))
        models.hold_samples = False
        await calls.result(running)
        failed = await calls.result(waiting)
        assert failed["category"] == "user"
        assert f"its weights are deleted (tinker://{model}/snapshots/1)" in failed["error"]
        assert "Create another sampling client" in failed["error"]
        assert str(tmp_path) not in failed["error"]


async def test_weights_that_the_server_lost_are_its_own_fault(tmp_path, capsys):
    async with serving(ScriptedModels(), settings(tmp_path)) as (service, calls):
        sampler = await calls.snapshot(await calls.model(await calls.session()), 1, 0)
        (record,) = service.holdings.checkpoints.values()
        (tmp_path / "weights" / record.folder / "done.json").unlink()
        failed = await calls.result(await calls.sample(sampler, 0))
        assert failed["category"] == "server"
        assert "the server cannot read its weights" in failed["error"]
        assert str(tmp_path) not in failed["error"]
    assert "its weights cannot be read" in capsys.readouterr().err


async def test_weights_that_an_engine_does_not_drop_end_nothing(tmp_path, monkeypatch, capsys):
    models = ScriptedModels()
    models.max_weights = 1

    def fails(weights):
        models.open -= 1
        raise EngineError("hung.")

    monkeypatch.setattr("scripted_models.Weights.drop", fails)
    async with serving(models, settings(tmp_path, limits=limits(max_snapshots=1))) as (_, calls):
        model = await calls.model(await calls.session())
        for number in range(2):
            sampler = await calls.snapshot(model, 1 + number, number)
            assert (await calls.result(await calls.sample(sampler, 0))).sequences
        assert "metrics" in await calls.result(await calls.optim_step(model, 3))
    assert "weights for sampling could not be dropped: hung." in capsys.readouterr().err


async def test_weights_that_are_opened_again_stay(tmp_path):
    """The request whose opening failed ends after another one has opened them."""
    models = ScriptedModels()
    models.max_weights = 1
    trainer = ThreadPoolExecutor(1)
    weights = OpenWeights(models, trainer)
    folder = tmp_path / "one"
    may_fail, again = threading.Event(), []

    def opens(folder):
        assert may_fail.wait(20)
        return ScriptedModels.open_weights(models, folder)

    def open_again(failed):
        folder.mkdir()
        (folder / "done.json").write_text("[]")
        again.append(asyncio.create_task(hold(weights, folder, until)))

    models.open_weights, until = opens, asyncio.Event()
    first = asyncio.create_task(hold(weights, folder))
    while folder not in weights._open:  # noqa: ASYNC110 - nothing reports it
        await asyncio.sleep(0)
    # Between those two that have the error.
    weights._open[folder].weights.add_done_callback(open_again)
    second = asyncio.create_task(hold(weights, folder))
    for _ in range(9):
        await asyncio.sleep(0)
    may_fail.set()
    found = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(error) for error in found] == [ModelError, ModelError]
    await weights._open[folder].weights
    assert models.open == 1
    until.set()
    await again[0]
    await weights.forget(folder)
    assert models.open == 0
    trainer.shutdown()


async def hold(weights, folder, until=None):
    async with weights.using(folder):
        if until is not None:
            await until.wait()


async def test_a_place_that_is_left_while_who_waits_for_it_is_cancelled():
    admission = Admission(1)

    async def sample():
        async with admission.place("one", 1):
            await asyncio.Event().wait()

    async def next_one():
        async with admission.place("two", 1):
            pass

    tasks = [asyncio.create_task(sample()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
    await asyncio.wait_for(next_one(), 60)


async def test_a_server_ends_with_samples_that_wait_for_a_place(tmp_path):
    models = ScriptedModels()
    models.hold_samples = True
    async with serving(models, settings(tmp_path, sampling_places=1)) as (_, calls):
        session = await calls.session()
        model = await calls.model(session)
        await calls.result(await calls.optim_step(model, 1))
        created = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        requests = [await calls.sample(created.json()["sampling_session_id"], seq) for seq in range(3)]
        await asyncio.to_thread(models.has_waiting.wait, 20)
    assert models.calls[-1] == f"{model} save"
    async with serving(ScriptedModels(), settings(tmp_path)) as (_, calls):
        for request in requests:
            assert (await calls.result(request)).sequences


async def test_tenants_take_turns_at_places_that_one_request_fills():
    admission, order = Admission(4), []

    async def sample(tenant):
        async with admission.place(tenant, 9):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(sample("one") for _ in range(4)), *(sample("two") for _ in range(2)))
    assert order == ["one", "two", "one", "two", "one", "one"]


# --- Adapters ---------------------------------------------------------------------------------------------------------


class Session:
    """A session whose adapters are their names."""

    def __init__(self):
        self.adapters = {}

    def load_adapter(self, name, folder, *, optimizer):
        raise ModelError("it does not fit.")


async def test_a_load_that_fails_hurts_its_model_alone(tmp_path, monkeypatch):
    models = object.__new__(SessionAdapters)
    models._session = session = Session()

    class Adapter:
        def remove(self):
            del session.adapters["a"]

    session.adapters["a"] = Adapter()
    # A folder that cannot be read: the model is as it was.
    with pytest.raises(ModelError, match="cannot be read as an adapter"):
        models.load("a", None, tmp_path, optimizer=True)
    assert "a" in session.adapters
    # One that the trainers do not take: the model has no weights, and its requests fail.
    monkeypatch.setattr("slime_tinker.session_adapters.require_loadable", lambda folder, optimizer: None)
    with pytest.raises(ModelError, match="does not fit"):
        models.load("a", None, tmp_path, optimizer=True)
    for call in (
        lambda: models.forward("a", []),
        lambda: models.optim_step("a", None),
        lambda: models.save("a", tmp_path / "state", optimizer=True),
    ):
        with pytest.raises(TrainingError, match="this model has no weights"):
            call()
    models.remove("a")


async def test_a_checkpoint_that_is_deleted_while_others_hear_of_it(tmp_path):
    """A model whose load fails trains on with what it had."""
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (service, calls):
        model = await calls.model(await calls.session())
        path = (await calls.save(model, 1, "first"))["path"]
        record = service.holdings.checkpoints[path]
        service.holdings.checkpoints[path] = replace(record, folder="gone")
        assert "cannot be read" in (await calls.load(model, 2, path))["error"]
        assert (await calls.result(await calls.optim_step(model, 3)))["metrics"]["step"] == 1
        assert not any(service.checkpoints.needed.values())
