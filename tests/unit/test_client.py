"""EngineClient, with engines that respond when the test lets them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from slime_core.contracts.middleware import RouterMiddleware
from slime_core.errors import EngineError, EngineRefused
from slime_core.rollout.client import EngineClient
from slime_core.rollout.request_replay import RequestReplay
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams


def request(name):
    return GenerateRequest(
        request_id=name, token_ids=np.array([1], np.int32), sampling=SamplingParams(max_new_tokens=4), seed=0
    )


def completion(one, text="stop"):
    return Completion(
        request_id=one.request_id,
        token_ids=np.array([7], np.int32),
        log_probs=np.array([-1.0], np.float32),
        finish_reason=FinishReason(text),
        spans=(),
    )


class Scripted:
    """Holds every message until `finish` names its requests; `fail` ends all of them."""

    def __init__(self):
        self.messages = []
        self.called = []
        self.open = {}
        self.strangers = []

    async def generate(self, requests):
        self.messages.append([one.request_id for one in requests])
        queue = asyncio.Queue()
        for one in requests:
            self.open[one.request_id] = (one, queue)
        for _ in requests:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                return
            yield item

    def finish(self, *names):
        for name in names:
            one, queue = self.open.pop(name)
            queue.put_nowait(completion(one))

    def fail(self, name, error):
        self.open[name][1].put_nowait(error)

    async def call(self, method, *args):
        self.called.append((method, *args))
        if method == "abort":
            for name in args[0]:
                if name in self.open:
                    one, queue = self.open.pop(name)
                    queue.put_nowait(completion(one, "abort"))
        return len(self.called)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def start(client, *names):
    return {name: asyncio.create_task(client.generate(request(name))) for name in names}


def client_of(num_engines=1, **how):
    engines = [Scripted() for _ in range(num_engines)]
    return EngineClient(engines, **{"concurrency": 99, **how}), engines


async def test_requests_of_one_loop_iteration_are_sent_together():
    client, (engine,) = client_of()
    first = start(client, "a", "b", "c")
    await settle()
    second = start(client, "d")
    await settle()
    assert engine.messages == [["a", "b", "c"], ["d"]]
    engine.finish("b", "d", "a", "c")
    for name, task in {**first, **second}.items():
        assert (await task).request_id == name


async def test_engines_take_turns_and_get_one_message_each():
    client, engines = client_of(3)
    tasks = start(client, *"abcdefg")
    await settle()
    assert [engine.messages for engine in engines] == [[["a", "d", "g"]], [["b", "e"]], [["c", "f"]]]
    # Round robin continues where it was, whichever requests were served meanwhile.
    engines[0].finish("a")
    more = start(client, "h")
    await settle()
    assert engines[1].messages[-1] == ["h"]
    for task in [*tasks.values(), *more.values()]:
        task.cancel()


async def test_no_engine_has_more_than_the_bound_and_the_rest_wait_in_order():
    client, (engine,) = client_of(concurrency=2)
    tasks = start(client, *"abcde")
    await settle()
    assert engine.messages == [["a", "b"]]
    engine.finish("b")
    await settle()
    assert engine.messages[1:] == [["c"]]
    engine.finish("a", "c")
    await settle()
    assert [name for message in engine.messages[2:] for name in message] == ["d", "e"]
    assert len(engine.open) == 2
    engine.finish("d", "e")
    assert [(await task).request_id for task in tasks.values()] == list("abcde")


async def test_a_full_engine_is_skipped():
    client, engines = client_of(2, concurrency=1)
    tasks = start(client, *"abc")
    await settle()
    engines[1].finish("b")
    await settle()
    assert engines[1].messages == [["b"], ["c"]]
    for task in tasks.values():
        task.cancel()


async def test_of_several_that_are_refused_together_only_the_cause_fails():
    client, (engine,) = client_of()
    tasks = start(client, "a", "wrong", "b")
    await settle()
    engine.fail("a", EngineRefused("token 99"))
    await settle()
    later = start(client, "c", "d")
    await settle()
    assert engine.messages == [["a", "wrong", "b"], ["a"], ["wrong"], ["b"], ["c", "d"]]
    engine.fail("wrong", EngineRefused("token 99"))
    engine.finish("a", "b", "d")
    with pytest.raises(EngineRefused, match="token 99"):
        await tasks.pop("wrong")
    for name, task in tasks.items():
        assert (await task).request_id == name
    # One that is left of its message is the one that was refused.
    engine.fail("c", EngineRefused("token 98"))
    with pytest.raises(EngineRefused, match="token 98"):
        await later["c"]
    assert len(engine.messages) == 5


async def test_a_refusal_that_a_caller_no_longer_waits_for_is_not_sent_again():
    client, (engine,) = client_of(concurrency=2)
    tasks = start(client, "a", "b", "c")
    await settle()
    tasks["b"].cancel()
    engine.fail("a", EngineRefused("token 99"))
    await settle()
    # The engine's places are free again: for "a", and for "c" that waited.
    assert sorted(engine.messages) == [["a"], ["a", "b"], ["c"]]
    engine.finish("a", "c")
    assert [(await tasks[name]).request_id for name in "ac"] == ["a", "c"]


async def test_aborting_waiting_and_running_requests():
    client, (engine,) = client_of(concurrency=1)
    tasks = start(client, *"abc")
    await settle()
    await client.abort(["a", "b", "gone"])
    aborted = await tasks["b"]
    assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.token_ids.shape == aborted.log_probs.shape == (0,)
    # The engine aborts the running request; it gets only ids of its own requests.
    assert (await tasks["a"]).finish_reason is FinishReason.ABORT
    assert engine.called == [("abort", ["a"])]
    await settle()
    assert engine.messages == [["a"], ["c"]]
    engine.finish("c")
    assert (await tasks["c"]).finish_reason is FinishReason.STOP


async def test_every_engine_gets_the_abort():
    client, engines = client_of(2)
    tasks = start(client, *"ab")
    await settle()
    await client.abort(["b"])
    assert [engine.called for engine in engines] == [[("abort", ["b"])], [("abort", ["b"])]]
    engines[0].finish("a")
    await asyncio.gather(*tasks.values())


async def test_cancelled_requests_are_never_sent():
    """Cancelled before an engine had it: it is never sent, and aborting it finds nothing."""
    client, (engine,) = client_of(concurrency=1)
    tasks = start(client, *"abc")
    await settle()
    tasks["b"].cancel()
    await client.abort(["b"])
    await settle()
    assert tasks["b"].cancelled()
    engine.finish("a")
    await settle()
    assert engine.messages == [["a"], ["c"]]
    engine.finish("c")
    await asyncio.gather(tasks["a"], tasks["c"])


async def test_a_cancelled_request_ends_in_its_engine():
    """A generator that waits for a while only: the engine would generate on, in a slot that others wait for."""
    client, (engine,) = client_of(concurrency=3)
    tasks = start(client, *"abcd")
    await settle()
    tasks["a"].cancel()
    tasks["c"].cancel()
    await settle()
    assert engine.called == [("abort", ["a", "c"])]
    assert engine.messages == [["a", "b", "c"], ["d"]]
    # One that ended before its caller was cancelled.
    engine.finish("d")
    await tasks["d"]
    tasks["d"].cancel()
    engine.finish("b")
    await tasks["b"]
    await settle()
    assert len(engine.called) == 1


async def test_a_response_is_of_the_request_and_not_of_an_earlier_one_with_its_id():
    """A group that is generated again has the ids of the first time."""
    client, (first, second) = client_of(2)
    given_up = start(client, "a")
    await settle()
    given_up["a"].cancel()
    await asyncio.gather(given_up["a"], return_exceptions=True)
    again = start(client, "a")
    await settle()
    assert (first.messages, second.messages) == ([["a"]], [["a"]])
    # The abort has ended the first one.
    assert not first.open
    assert not again["a"].done()
    second.finish("a")
    assert (await again["a"]).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("failure", [RuntimeError("boom"), None])
async def test_a_failing_engine_reaches_every_waiter(failure):
    client, (engine,) = client_of(concurrency=3)
    tasks = start(client, *"abcd")
    await settle()
    engine.finish("b")
    await settle()
    engine.fail("a", failure)
    await settle()
    expected = EngineError if failure is None else RuntimeError
    for name in "ac":
        with pytest.raises(expected, match="ended its response" if failure is None else "boom"):
            await tasks[name]
    assert (await tasks["b"]).request_id == "b"
    # The one that waited for a place was not forgotten.
    assert engine.messages[-1] == ["d"]
    engine.finish("d")
    await tasks["d"]


async def test_waiters_do_not_hang_when_the_last_request_fails():
    client, (engine,) = client_of(concurrency=1)
    tasks = start(client, *"ab")
    await settle()
    engine.fail("a", RuntimeError("boom"))
    await settle()
    with pytest.raises(RuntimeError):
        await tasks["a"]
    engine.finish("b")
    assert (await asyncio.wait_for(tasks["b"], 5)).request_id == "b"


async def test_a_response_to_another_request_is_an_error():
    client, (engine,) = client_of(concurrency=1)
    tasks = start(client, "a")
    await settle()
    engine.open["a"][1].put_nowait(completion(request("b")))
    with pytest.raises(EngineError, match="responded to b, which it did not get"):
        await tasks["a"]


async def test_a_request_id_twice_in_flight_is_an_error():
    client, (engine,) = client_of()
    tasks = start(client, "a")
    await settle()
    with pytest.raises(EngineError, match="a is in flight already"):
        await client.generate(request("a"))
    engine.finish("a")
    await tasks["a"]
    # Afterwards it may be used again.
    again = start(client, "a")
    await settle()
    engine.finish("a")
    await again["a"]


class Notes(RouterMiddleware):
    def __init__(self, name, log):
        self.name, self.log = name, log

    async def __call__(self, request, call_next):
        self.log.append(f"{self.name} in {request.request_id}")
        completion = await call_next(replace(request, request_id=f"{request.request_id}{self.name}"))
        self.log.append(f"{self.name} out")
        return replace(completion, extra={**completion.extra, self.name: 1.0})


async def test_middlewares_are_passed_outermost_first():
    log = []
    client, (engine,) = client_of(middlewares=[Notes("x", log), Notes("y", log)])
    tasks = start(client, "a")
    await settle()
    assert engine.messages == [["axy"]]
    engine.finish("axy")
    completion = await tasks["a"]
    assert log == ["x in a", "y in ax", "y out", "x out"]
    assert list(completion.extra) == ["y", "x"]


async def test_each_calls_every_engine():
    client, engines = client_of(3)
    assert client.num_engines == 3
    assert await client.call_all("pause", 1) == [1, 1, 1]
    assert [engine.called for engine in engines] == [[("pause", 1)]] * 3


class Steers(RouterMiddleware):
    """Sends each request to the engine in the last character of its name."""

    def __init__(self):
        self.offered = []

    async def __call__(self, request, call_next):
        self.offered.append(request.engines)
        digits = [int(character) for character in request.request_id.partition("@")[2]]
        return await call_next(replace(request, engines=tuple(digits)) if digits else request)


async def test_after_a_failure_engines_still_offload():
    """What was trained is saved before the run ends, on the devices that trainer and engines share."""
    client, (first, second) = client_of(2)

    async def broken(method, *args):
        raise EngineError("engine 1 is gone")

    second.call = broken
    client.fail(EngineError("lost again"))
    for method in ("pause", "sleep"):
        assert await client.call_by_index(method) == {}
    assert first.called == [("pause",), ("sleep",)]
    assert client.quiesce
    for method in ("wake_up", "resume", "health"):
        with pytest.raises(EngineError, match="lost again"):
            await client.call_by_index(method)
    assert len(first.called) == 2


async def test_a_middleware_chooses_the_engine():
    steers = Steers()
    client, engines = client_of(3, concurrency=1, middlewares=[steers])
    tasks = start(client, "a@2", "b@2", "c@21", "d", "e")
    await settle()
    assert steers.offered == [(0, 1, 2)] * 5
    # b requires an engine that is full and waits, c takes its second choice, and d, which may go anywhere, is not held up.
    assert [engine.messages for engine in engines] == [[["d"]], [["c@21"]], [["a@2"]]]
    engines[0].finish("d")
    await settle()
    assert engines[0].messages == [["d"], ["e"]]
    engines[2].finish("a@2")
    await settle()
    assert engines[2].messages == [["a@2"], ["b@2"]]
    engines[0].finish("e")
    engines[1].finish("c@21")
    engines[2].finish("b@2")
    await asyncio.gather(*tasks.values())


class Keeps(RouterMiddleware):
    """Lets nothing on before `gate` is set."""

    def __init__(self):
        self.gate = asyncio.Event()

    async def __call__(self, request, call_next):
        await self.gate.wait()
        return await call_next(request)


async def test_requests_in_a_middleware_can_be_aborted():
    keeps = Keeps()
    client, (engine,) = client_of(middlewares=[keeps])
    tasks = start(client, "a", "b")
    await settle()
    await client.abort(["a", "gone"])
    keeps.gate.set()
    assert (await tasks["a"]).finish_reason is FinishReason.ABORT
    await settle()
    assert engine.messages == [["b"]]
    engine.finish("b")
    await tasks["b"]
    # The id can be used again.
    again = start(client, "a")
    await settle()
    engine.finish("a")
    assert (await again["a"]).finish_reason is FinishReason.STOP


async def test_a_request_does_not_wait_for_an_engine_that_was_lost():
    client, engines = client_of(2, middlewares=[Steers()])
    client.watch(lambda *loss: None)
    client.quarantine(1, EngineError("gone"))
    tasks = start(client, "a@1")
    await settle()
    assert engines[0].messages == [["a@1"]]
    engines[0].finish("a@1")
    await tasks["a@1"]


async def test_a_request_for_a_missing_engine_is_an_error():
    client, _ = client_of(2, middlewares=[Steers()])
    with pytest.raises(EngineError, match=r"asks for engines \(5,\); there are 2"):
        await client.generate(request("a@5"))


async def test_a_text_without_tokens_is_an_error():
    client, (engine,) = client_of()
    with pytest.raises(EngineError, match="has a text but no tokens"):
        await client.generate(replace(request("a"), token_ids=np.empty(0, np.int32), text="1+1="))
    assert engine.messages == []


async def test_a_replayed_request_reaches_an_engine_if_it_did_then():
    """Before the first checkpoint a was asked twice, and b never; b comes after it."""
    engines = [Scripted(), Scripted()]
    client = EngineClient(engines, concurrency=4)
    client.script = RequestReplay([{"a": [1, 0]}, {"b": [1]}])
    asked_b, asked_a = (asyncio.create_task(client.generate(request(name))) for name in ("b", "a"))
    await settle()
    assert [engine.messages for engine in engines] == [[], [["a"]]]
    settled = asyncio.create_task(client.script.settled())
    engines[1].finish("a")
    await asked_a
    await settle()
    assert not settled.done()
    asked_a = asyncio.create_task(client.generate(request("a")))
    await settled
    assert engines[0].messages == [["a"]]
    engines[0].finish("a")
    await asked_a
    # Broken off for the checkpoint, it stayed behind.
    await client.abort(["b"])
    assert (await asked_b).finish_reason is FinishReason.ABORT
    client.script.next_part()
    asked_b = asyncio.create_task(client.generate(request("b")))
    await settle()
    assert engines[1].messages == [["a"], ["b"]]
    engines[1].finish("b")
    await asked_b
    client.script.next_part()
    # What comes after all that was written down goes as ever.
    asked_c = asyncio.create_task(client.generate(request("c")))
    await settle()
    next(engine for engine in engines if "c" in engine.open).finish("c")
    await asked_c
