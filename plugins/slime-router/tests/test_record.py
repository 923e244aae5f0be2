"""record: recorded responses are replayed."""

import json

import numpy as np
import pytest
from router_script import request, respond

from slime_core.errors import DataError, EngineError, StorageError
from slime_core.types.completion import FinishReason, SamplingParams
from slime_core.types.image import Image
from slime_core.types.sample import VersionSpan
from slime_router.plugin import Record
from slime_router.requests import parse


def recorder(path):
    return Record.build(Record.Config(path=str(path)))


def replayer(path, **options):
    return Record.build(Record.Config(path=str(path), mode="replay", **options))


async def no_engine(asked):
    raise AssertionError("the request reached an engine")


def script(*completions):
    left = list(completions)

    async def call_next(asked):
        return left.pop(0)(asked)

    return call_next


async def test_replayed_responses_are_equal_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    log_probs = [rng.normal(size=length).astype(np.float32) for length in (0, 1, 37)]
    asked = [request(f"r{n}", range(1, n + 2), seed=n) for n in range(3)]
    given = [
        respond(
            one,
            rng.integers(0, 150_000, len(values)),
            log_probs=values,
            spans=(VersionSpan(1, 0, 1), VersionSpan(2, 1, len(values))) if len(values) > 1 else (),
            finish_reason=reason,
            cached_tokens=4,
            engine_index=1,
            extra={"spec_accept_rate": 0.1},
            routed_experts=rng.integers(0, 300, (len(values) + 4, 3, 2)).astype(np.uint16) if len(values) else None,
        )
        for one, values, reason in zip(asked, log_probs, FinishReason, strict=True)
    ]
    path = tmp_path / "deep" / "answers.jsonl"
    record = recorder(path)
    for one, completion in zip(asked, given, strict=True):
        assert await record(one, script(lambda _, c=completion: c)) is completion
    replay = replayer(path)
    for one, completion in reversed(list(zip(asked, given, strict=True))):
        again = await replay(one, no_engine)
        for name in ("request_id", "finish_reason", "spans", "cached_tokens", "engine_index", "extra"):
            assert getattr(again, name) == getattr(completion, name)
        for name, dtype in (("token_ids", np.int32), ("log_probs", np.float32)):
            assert getattr(again, name).dtype == dtype
            np.testing.assert_array_equal(getattr(again, name), getattr(completion, name))
        assert (again.routed_experts is None) == (completion.routed_experts is None)
        if again.routed_experts is not None:
            assert again.routed_experts.dtype == np.uint16
            np.testing.assert_array_equal(again.routed_experts, completion.routed_experts)
    assert (record.metrics(), replay.metrics()) == ({"recorded": 3}, {"replayed": 3, "missing": 0})
    # The file is readable text.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request"]["request_id"] for line in lines] == ["r0", "r1", "r2"]


async def test_equal_requests_get_their_responses_in_order_and_then_no_more(tmp_path):
    record = recorder(tmp_path / "a")
    for name, token in (("x", 1), ("y", 2)):
        await record(request(name), script(lambda asked, t=token: respond(asked, [t])))
    replay = replayer(tmp_path / "a")
    # The id does not count: a retry has another one.
    assert [(await replay(request("z"), no_engine)).token_ids.tolist() for _ in range(2)] == [[1], [2]]
    with pytest.raises(DataError, match="no response to it was recorded"):
        await replay(request("z"), no_engine)
    forward = replayer(tmp_path / "a", on_missing="forward")
    other = request("o", sampling=SamplingParams(max_new_tokens=9))
    assert (await forward(other, script(lambda asked: respond(asked, [5])))).token_ids.tolist() == [5]


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"routed_experts_from": 1}, {"token_ids": np.array([1, 3], np.int32)}, {"text": "t"},
               {"images": (Image(data=b"a cat"),)},
               {"sampling": SamplingParams(max_new_tokens=8, temperature=0.5)}]
)  # fmt: skip
async def test_a_different_request_gets_no_recorded_response(tmp_path, change):
    await recorder(tmp_path / "a")(request(), script(respond))
    with pytest.raises(DataError):
        await replayer(tmp_path / "a")(request(**change), no_engine)


async def test_all_fields_of_a_request_over_http_count(tmp_path):
    def asked(name, **more):
        params = {"max_new_tokens": 4, "n": 1, **more.pop("params", {})}
        body = {"rid": name, "text": "what?", "sampling_params": params, "lora_path": None, **more}
        return parse(json.dumps(body).encode(), session_id=None, read_tokens=True).requests[0]

    ways = [{}, {"image_data": ["aGk="]}, {"image_data": ["aGl="]}, {"lora_path": "x"}, {"params": {"regex": "a+"}}]
    record = recorder(tmp_path / "a")
    for number, way in enumerate(ways):
        await record(asked("a", **way), script(lambda one, n=number: respond(one, [n])))
    replay = replayer(tmp_path / "a")
    for number, way in reversed(list(enumerate(ways))):
        again = asked("b", **way, stream=True, priority=3)
        assert (await replay(again, no_engine)).token_ids.tolist() == [number]


async def test_a_failure_is_not_recorded_and_a_restart_appends(tmp_path):
    async def fails(asked):
        raise EngineError("boom")

    with pytest.raises(EngineError, match="boom"):
        await recorder(tmp_path / "a")(request(), fails)
    assert (tmp_path / "a").read_bytes() == b""
    for token in (1, 2):
        await recorder(tmp_path / "a")(request(), script(lambda asked, t=token: respond(asked, [t])))
    assert len((tmp_path / "a").read_text().splitlines()) == 2


async def test_a_recording_that_was_cut_short_or_is_invalid(tmp_path):
    path = tmp_path / "a"
    record = recorder(path)
    await record(request(seed=1), script(respond))
    await record(request(seed=2), script(respond))
    path.write_bytes(path.read_bytes()[:-9])
    replay = replayer(path)
    await replay(request(seed=1), no_engine)
    with pytest.raises(DataError, match="no response"):
        await replay(request(seed=2), no_engine)
    whole = path.read_bytes().partition(b"\n")[0] + b"\n"
    path.write_bytes(whole + b"surprise\n")
    with pytest.raises(DataError, match=r"a:2: not a recorded response"):
        replayer(path)
    fields = json.loads(whole)
    del fields["completion"]["log_probs"]
    path.write_text(json.dumps(fields) + "\n")
    with pytest.raises(DataError, match=r"a:1: not a recorded response.*log_probs"):
        await replayer(path)(request(seed=1), no_engine)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(DataError, match="cannot be replayed: No such file"):
        replayer(tmp_path / "none")
    with pytest.raises(StorageError, match="cannot be written: Is a directory"):
        recorder(tmp_path)


async def test_a_full_disk_is_reported():
    record = recorder("/dev/full")
    with pytest.raises(StorageError, match="No space left"):
        await record(request(), script(respond))
