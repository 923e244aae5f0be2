"""One engine on two machines, tensor parallel: two servers of one address each, which meet by themselves."""

import asyncio
import os
import re
import signal
from dataclasses import replace

import pytest
import torch
from engine_setup import setup_for

from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import load_plain, log_probs_of, moved, prompts
from slime_plugin_kit.tiny_serving import NATS, ask, tokens_of
from slime_serving.held_port import held_port, place_of
from slime_sglang.plugin import Sglang
from slime_sglang.receiver import SglangReceiver
from slime_transports.equality import EqualityCheck
from slime_transports.flattened_bucket import flatten
from slime_transports.handles import SharedMemory
from slime_transports.plugin import Disk, Distributed

pytestmark = pytest.mark.sglang

HOSTS = ("127.0.0.2", "127.0.0.3")


class Link:
    """`EngineGroup` and `TrainerLink` of one engine and one rank."""

    num_engines = 1

    def __init__(self, engine, sender, model):
        self._engine, self._sender, self._model = engine, sender, model

    async def call_all(self, method, *given):
        return [await getattr(self._engine, method)(*given)]

    async def send(self, version, engines):
        def export(*, all_ranks):
            for name, tensor in self._model.state_dict().items():
                yield {name: tensor.float()}

        return [await asyncio.to_thread(self._sender.send, export, version, engines)]


CHANGES = {
    "model.embed_tokens.weight": (0, 3, 0, None),
    "model.layers.0.self_attn.q_proj.weight": (1, -1, -1, 0),
    "model.layers.0.self_attn.o_proj.weight": (0, 2, 1, 1),
    "model.layers.1.mlp.up_proj.weight": (1, -1, 0, 0),
    "model.layers.1.mlp.down_proj.weight": (1, 0, -1, 1),
    "model.layers.1.input_layernorm.weight": (0, 5, None, None),
}
"""An element of a tensor that one rank is given another value of: the rank, row and column, and in which dimension the rank has
only a part."""


def require_differences(servers, engines, model):
    """After a push that one rank has got one element of wrong."""
    weights = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    for name, (rank, row, column, dim) in CHANGES.items():
        wrong = weights[name].clone()
        wrong[(row,) if column is None else (row, column)] += 1
        memories = [SharedMemory(flatten([(name, tensor)], index=0, last=False)) for tensor in (weights[name], wrong)]
        for given in ([memories[place == rank] for place in range(2)], memories[:1] * 2):
            check = EqualityCheck(servers, engines, 1)
            check.digests.add(flatten(list(weights.items()), index=0, last=True))
            payloads = [memory.payload(SglangReceiver) for memory in given]
            body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
            servers.finish(
                servers.call_all(
                    engines, lambda receiver, body=body: receiver._post("/update_weights_from_tensor", body)
                )
            )
            if given[0] is given[1]:
                assert check.require_equal() == "trainer"
                continue
            part = "" if dim is None else rf" \(\d+ to \d+ of dimension {dim}\)"
            with pytest.raises(EngineError, match=rf"the trainer sent: {re.escape(name)}{part} of rank {rank}\.$"):
                check.require_equal()
        for memory in memories:
            memory.close()


async def until_unwell(engine):
    while True:
        await engine.health()
        await asyncio.sleep(0.05)


async def test_an_engine_over_two_machines(tiny, tmp_path):
    held = held_port(HOSTS[0])
    whole = setup_for(
        tiny,
        tmp_path,
        num_devices=2,
        num_nodes=2,
        rendezvous=place_of(held),
        max_batch=8,
        transport="disk",
    )
    engines = [Sglang.build(Sglang.Config(start_timeout=240)) for _ in HOSTS]
    setups = [replace(whole, host=host, node_rank=rank, run_dir=tmp_path / host) for rank, host in enumerate(HOSTS)]
    config = Distributed.Config(
        update_weight_buffer_size=4096, update_weights_timeout=60.0, check_weight_update_equal=True
    )
    sender = Distributed.build_sender(config)
    place = SenderSetup(rank=0, world_size=1, device="cpu", model_path=tiny, run_dir=tmp_path, colocated=False)
    sender.setup(place)
    files = Disk.build_sender(Disk.Config(update_weights_timeout=60.0))
    files.setup(place)
    first, beside = engines
    try:
        infos = await asyncio.gather(*(engine.start(setup) for engine, setup in zip(engines, setups, strict=True)))
        assert infos[0].address.startswith(f"http://{HOSTS[0]}:")
        assert (infos[1].address, infos[1].capabilities) == (None, frozenset())
        model = moved(load_plain(tiny, torch.float32), seed=5)
        await first.pause()
        link = Link(first, sender, model)
        endpoints = await first.endpoints()
        report = await Distributed.build(config).push(link, link, 1)
        assert report.buckets > 5
        assert report.compared_with == "trainer"
        await asyncio.to_thread(require_differences, sender.servers, endpoints, model)
        # Both ranks must report that they have loaded a folder.
        link = Link(first, files, model)
        assert (await Disk.build(Disk.Config()).push(link, link, 2)).buckets == 1
        await first.resume()
        requests = [ask(number, prompt) for number, prompt in enumerate(prompts(4, seed=1))]
        for request, response in zip(requests, await first.generate(requests), strict=True):
            with torch.no_grad():
                exact = log_probs_of(model, request.token_ids.tolist(), tokens_of(response))[0].numpy()
            assert abs(response.log_probs - exact).max() < NATS
            assert {span.version for span in response.spans} == {2}
        await asyncio.gather(first.health(), beside.health())

        os.kill(infos[1].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await until_unwell(beside)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
        sender.close()
        files.close()
        held.close()


async def test_servers_of_one_engine_stay_on_one_machine(tiny, tmp_path):
    engine = Sglang.build(Sglang.Config(servers=2))
    with pytest.raises(EngineError, match=r"engine\.servers = 2: the 4 devices of an engine are on 2 machines"):
        await engine.start(setup_for(tiny, tmp_path, num_devices=4, num_nodes=2, rendezvous="127.0.0.1:1"))
