"""Comparison of the trainer's weights with those that servers report."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_sglang.receiver import OWN_ACTION, SglangReceiver
from slime_sglang.server.shard_actions import REFUSED, SKIPPED
from slime_transports.equality import EqualityCheck
from slime_transports.flattened_bucket import checksum, flatten
from slime_transports.places import Place
from slime_transports.receiver import Refused

SENT = {"w": torch.arange(24.0).view(6, 4), "norm": torch.arange(4.0), "lm_head.weight": torch.ones(2)}
"""The head is tied: no server holds it."""


def held(name, tensor, dim=0, start=0, **more):
    """A part that a rank holds, and its digest."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {str(Place(name=name, dim=dim, start=start, length=tensor.shape[dim], dtype=dtype)): checksum(tensor)} | more


def ranks(*found):
    """The response of a server with these ranks."""
    return [
        {"checksums": checksums, "parallelism_info": {"rank": rank, "size": len(found)}}
        for rank, checksums in enumerate(found)
    ]


class Checked:
    """`Servers` that respond to /weights_checker: what each rank holds, or refusals; and SGLang's own sums."""

    parallelism: Mapping = {}

    def __init__(self, named, own=()):
        self.named, self.own = named, own

    def call_all(self, engines, step, *, what=""):
        calls = []
        for engine in engines:
            calls.append(Future())
            server = SimpleNamespace(name=f"engine {engine.index} ({engine.url})", post=partial(self.post, engine))
            try:
                calls[-1].set_result(asyncio.run(step(SglangReceiver(server, 1, 5.0))))
            except EngineError as error:
                calls[-1].set_exception(Refused(str(error)))
        return calls

    async def post(self, engine, path, body, *, timeout_s):
        if body["action"] == OWN_ACTION:
            rank = {"per_gpu_checksum": self.own[engine.index], "parallelism_info": self.parallelism}
            return {"success": True, "ranks": [rank]}
        if self.named[engine.index] is None:
            raise EngineError("Unsupported action")
        return {"success": True, "ranks": self.named[engine.index]}

    def wait(self, calls):
        return [call.result() for call in calls]


def compared(named, own=(), sent=SENT, num_engines=None):
    engines = [EngineEndpoint(index=index, url=f"http://e{index}") for index in range(num_engines or len(named))]
    check = EqualityCheck(Checked(named, own), engines, 1)
    check.digests.add(flatten(list(sent.items()), index=0, last=True))
    return check.require_equal()


WHOLE = ranks(held("w", SENT["w"]) | held("norm", SENT["norm"]))
OTHER = ranks(held("w", SENT["w"] + 1) | held("norm", SENT["norm"]))


def test_the_report_names_what_weights_were_compared_with():
    """Servers that cannot name their parts are only compared with one another: equal ones may hold the same wrong weights."""
    assert compared([WHOLE, WHOLE]) == "trainer"
    assert compared([WHOLE, None], num_engines=1) == "trainer"
    assert compared([None, None], ["a", "a"]) == "engines"
    assert compared([WHOLE, None, None], ["", "a", "a"]) == "engines"
    with pytest.raises(EngineError, match=r"engine 1 .* its weights differ from those of engine 0"):
        compared([None, None], ["a", "b"])
    with pytest.raises(
        EngineError, match=r"engine 0 cannot .* Pass --no-check-weight-update-equal, .* Unsupported action"
    ):
        compared([None, WHOLE])
    with pytest.raises(EngineError, match=r"engine 1 .*does not hold what the trainer sent: w\.$"):
        compared([WHOLE, OTHER])


class Staged(Checked):
    """Servers with pipeline stages, of which the first responds."""

    parallelism: Mapping = {"rank": 0, "size": 2, "pp_size": 2}


def test_equal_first_stages_are_not_taken_for_equal_weights():
    engines = [EngineEndpoint(index=index, url=f"http://e{index}") for index in range(2)]
    check = EqualityCheck(Staged([None, None], ["a", "a"]), engines, 1)
    with pytest.raises(EngineError) as raised:
        check.require_equal()
    assert str(raised.value) == (
        "sync.check_weight_update_equal: engine 0 (http://e0) has 2 pipeline stages, and only the first one responds: the "
        "weights of the others would not be compared. Pass --no-check-weight-update-equal, or use servers with one stage."
    )


def parts(first, second):
    """Two ranks: w by rows, the norm whole."""
    return ranks(
        *({**held("w", own, start=start), **held("norm", SENT["norm"])} for start, own in ((0, first), (3, second)))
    )


def test_parts_of_ranks_are_compared_with_the_sent_parts():
    upper, lower = SENT["w"].chunk(2)
    assert compared([parts(upper, lower)]) == "trainer"
    left, right = SENT["w"].chunk(2, dim=1)
    norm = held("norm", SENT["norm"])
    assert compared([ranks(held("w", left, 1, 0) | norm, held("w", right, 1, 2) | norm)]) == "trainer"
    changed = lower.clone()
    changed[2, 3] += 1
    with pytest.raises(EngineError, match=r"the trainer sent: w \(3 to 6 of dimension 0\) of rank 1\.$"):
        compared([parts(upper, changed)])
    with pytest.raises(
        EngineError, match=r"w \(0 to 3 of dimension 0\) of rank 0, w \(3 to 6 of dimension 0\) of rank 1"
    ):
        compared([parts(lower, upper)])


def test_sent_tensors_are_compared_in_the_servers_dtype():
    """The norm in float32, though it is sent in bfloat16, and the rest the other way round."""
    sent = {"w": SENT["w"] / 7, "norm": SENT["norm"].bfloat16()}
    assert compared([ranks(held("w", sent["w"].bfloat16()) | held("norm", SENT["norm"]))], sent=sent) == "trainer"
    with pytest.raises(EngineError, match=r"sent: w\.$"):
        compared([ranks(held("w", (sent["w"] * 1.01).bfloat16()) | held("norm", SENT["norm"]))], sent=sent)


def test_a_tensor_that_its_parts_do_not_cover_is_named():
    upper, _ = SENT["w"].chunk(2)
    with pytest.raises(EngineError, match=r"sent: w \(not held whole\)\.$"):
        compared([ranks(held("w", upper) | held("norm", SENT["norm"]), held("norm", SENT["norm"]))])
    with pytest.raises(EngineError, match=r"sent: w \(not held whole\)\.$"):
        compared([ranks(held("w", SENT["w"][:2]) | held("norm", SENT["norm"]), held("w", SENT["w"][3:], start=3))])
    with pytest.raises(EngineError, match=r"sent: norm \(not held\), v \(not sent\)\.$"):
        compared([ranks(held("w", SENT["w"]) | held("v", SENT["w"]))])
    with pytest.raises(EngineError, match=r"sent: w \(0 to 9 of dimension 0\)\.$"):
        compared([ranks(held("w", torch.ones(9, 4)) | held("w", SENT["w"]) | held("norm", SENT["norm"]))])


def test_tensors_that_a_model_does_not_load_are_not_missing():
    """Layers that predict further tokens, and drafts, which SGLang names in its own way."""
    sent = SENT | {"model.layers.2.norm": torch.ones(2), "model.layers.20.norm": torch.ones(2)}
    draft = {f"draft.{next(iter(held('x', torch.ones(2))))}": "any", "draft.refused": "a draft"}
    found = [ranks(WHOLE[0]["checksums"] | {SKIPPED: "model.layers.2. model.layers.3."} | draft)]
    with pytest.raises(EngineError, match=r"sent: model\.layers\.20\.norm \(not held\)\.$"):
        compared(found, sent=sent)
    del sent["model.layers.20.norm"]
    assert compared(found, sent=sent) == "trainer"


def test_a_server_with_a_refusing_or_missing_rank_cannot_report():
    refused = ranks(WHOLE[0]["checksums"], {REFUSED: "what a.b is made of is not known"})
    with pytest.raises(EngineError, match=r"engine 0 cannot .*rank 1: what a\.b is made of is not known"):
        compared([refused])
    with pytest.raises(EngineError, match=r"of its 2 ranks only \[0\] report the weights they hold"):
        compared([parts(*SENT["w"].chunk(2))[:1]])
    # Under data-parallel attention several response for all.
    assert compared([2 * parts(*SENT["w"].chunk(2))]) == "trainer"
