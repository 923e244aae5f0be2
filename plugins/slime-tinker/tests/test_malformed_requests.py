"""What no client of the SDK sends: each is refused by name, and the server serves on."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted_models import ScriptedModels
from sdk_calls import serving, settings
from tinker.proto import tinker_public_pb2 as pb

from slime_core.errors import DataError, StorageError
from slime_tinker.errors import RequestError
from slime_tinker.futures import Futures
from slime_tinker.journal import Journal, Statement
from slime_tinker.records import RequestRecord
from slime_tinker.sampler_weights import OpenWeights
from slime_tinker.training_data import dense, tokens_of

pytestmark = pytest.mark.asyncio

INT64, FLOAT32 = pb.DTYPE_INT64, pb.DTYPE_FLOAT32


def sparse(shape, rows=b"", places=b"", values=b""):
    return pb.Tensor(
        dtype=FLOAT32,
        shape=shape,
        sparse_csr=pb.SparseCsr(crow_indices=rows, col_indices=places, values=values),
    )


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (pb.Tensor(dtype=FLOAT32, dense=b"abc"), "3 bytes, and a value has 4"),
        (pb.Tensor(dtype=INT64, dense=bytes(12)), "12 bytes, and a value has 8"),
        (pb.Tensor(dtype=FLOAT32, dense=bytes(4), shape=[-1, -1]), "a size is below 0"),
        # Its product is 0 in 64 bits.
        (pb.Tensor(dtype=FLOAT32, dense=b"", shape=[2**32, 2**32]), "0 values for the shape"),
        (sparse([-1, 2]), "a size is below 0"),
        (sparse([1, 2], rows=b"abc"), "crow_indices: 3 bytes"),
        (sparse([1, 10**12], rows=bytes(16)), "a position may have from 1 to 128 targets"),
    ],
)
async def test_tensors_that_are_none(tensor, words):
    with pytest.raises(RequestError, match=words):
        dense(tensor, "data[0]")


async def test_tokens_of_half_a_number():
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"abcde"))
    with pytest.raises(RequestError, match=r"input.chunks\[0\]: 5 bytes, and a value has 4"):
        tokens_of([chunk], "input")


async def test_numbers_beyond_64_bits(tmp_path):
    models = ScriptedModels()
    async with serving(models, settings(tmp_path)) as (_, calls):
        session = await calls.session()
        model = await calls.model(session)
        far = await calls.post("optim_step", model_id=model, seq_id=10**30, adam_params={})
        assert (far.status_code, "seq_id = 1000" in far.json()["detail"]) == (400, True)
        created = await calls.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        sampler = created.json()["sampling_session_id"]
        far = await calls.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=10**30,
            num_samples=1,
            prompt={"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            sampling_params={"max_tokens": 1},
        )
        assert far.status_code == 400
        failed = await calls.result(
            await calls.sample(sampler, 0, prompt={"chunks": [{"tokens": [10**30], "type": "encoded_text"}]})
        )
        assert "prompt: a token is outside the vocabulary of 50" in failed["error"]
        assert "metrics" in await calls.result(await calls.optim_step(model, 1))


def request(seq):
    return RequestRecord(id=f"m:{seq}", owner="m", seq=seq, kind="optim_step", tenant="t", body=b"", created=0.0)


async def test_a_write_that_fails_leaves_the_next_one_alone(tmp_path):
    journal = Journal(tmp_path / "journal")
    with pytest.raises(DataError, match="cannot hold it"):
        await journal.write([Statement("insert into records values (1, ?, ?)", (10**30, ""))])
    await journal.write([Statement("insert into records values (1, 'a', '{}')", ())])
    await journal.close()


async def test_a_request_that_could_not_be_written_is_a_new_one_when_it_is_sent_again(tmp_path, monkeypatch):
    """One that is sent twice meanwhile is acknowledged with the first, or as a new one after it has failed."""
    journal = Journal(tmp_path / "journal")
    futures = Futures(journal, poll_s=0.1)
    apply, begun, may_fail = journal._apply, threading.Event(), threading.Event()

    def fails_once(statements):
        if not may_fail.is_set():
            begun.set()
            may_fail.wait(20)
            raise StorageError("full")
        apply(statements)

    monkeypatch.setattr(journal, "_apply", fails_once)
    first = asyncio.create_task(futures.accept(request(1)))
    await asyncio.to_thread(begun.wait, 20)
    second = asyncio.create_task(futures.accept(request(1)))
    await asyncio.sleep(0.01)
    may_fail.set()
    with pytest.raises(StorageError, match="full"):
        await first
    assert await second is True
    assert (await journal.outcome("m:1"))[0] == "t"
    await journal.close()


async def test_a_request_that_is_sent_twice_is_acknowledged_when_it_is_on_the_disk(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal")
    futures = Futures(journal, poll_s=0.1)
    order, apply = [], journal._apply

    def noted(statements):
        apply(statements)
        order.append(("written", len(statements)))

    monkeypatch.setattr(journal, "_apply", noted)
    assert await futures.accept(request(1)) is True

    async def again():
        assert await futures.accept(request(2)) is False
        order.append("acknowledged")

    await asyncio.gather(futures.accept(request(2)), again())
    assert order.index("acknowledged") > order.index(("written", 1), 1)
    await journal.close()


async def test_weights_are_dropped_though_the_request_that_makes_room_is_cancelled(tmp_path):
    models = ScriptedModels()
    models.max_weights = 1
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "done.json").write_text("[]")
    trainer = ThreadPoolExecutor(1)
    weights = OpenWeights(models, trainer)
    async with weights.using(tmp_path / "one"):
        pass
    models.gate.clear()
    trainer.submit(models.gate.wait)

    async def use():
        async with weights.using(tmp_path / "two"):
            pass

    making_room = asyncio.create_task(use())
    for _ in range(9):
        await asyncio.sleep(0)
    making_room.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await making_room
    models.gate.set()
    await use()
    assert models.open == 1
    trainer.shutdown()


async def test_weights_that_could_not_be_opened_hurt_no_one_else(tmp_path):
    models = ScriptedModels()
    models.max_weights = 1
    (tmp_path / "one").mkdir()
    (tmp_path / "one/done.json").write_text("[]")
    trainer = ThreadPoolExecutor(1)
    weights = OpenWeights(models, trainer)
    models.gate.clear()
    trainer.submit(models.gate.wait)

    async def use(name):
        async with weights.using(tmp_path / name):
            pass

    missing = asyncio.create_task(use("missing"))
    for _ in range(9):
        await asyncio.sleep(0)
    missing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await missing
    models.gate.set()
    # Takes the place of what cannot be opened.
    await use("one")
    assert models.open == 1
    trainer.shutdown()
