"""The four transports against a real server: what it responds afterwards is what transformers makes of the weights."""

import asyncio

import numpy as np
import pytest
import torch
from engine_setup import setup_for

from slime_core.errors import EngineError
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.tiny_model import load_plain, log_probs_of, logits_of, moved, prompts
from slime_plugin_kit.tiny_serving import NATS, ask, tokens_of
from slime_transports import folder
from slime_transports.equality import EqualityCheck
from slime_transports.flattened_bucket import flatten
from slime_transports.plugin import Delta, Disk, Distributed, Ipc

pytestmark = pytest.mark.sglang

DRIVERS = {"disk": Disk, "distributed": Distributed, "ipc": Ipc, "delta": Delta}
COMPARED = {"check_weight_update_equal": True}


def play(build, tiny, tmp_path, scene, **options):
    async def whole():
        engine = build()
        await engine.start(setup_for(tiny, tmp_path))
        try:
            await asyncio.wait_for(scene(engine), 120)
        finally:
            await engine.stop()

    asyncio.run(whole())


async def update_weights(rank, engine, version):
    await engine.pause()
    report = await rank.push(engine, version)
    await engine.resume()
    return report


async def require_same_responses(engine, model, version):
    """Greedy tokens, log-probs and version."""
    requests = [ask(n, prompt, name=f"v{version}/{n}", temperature=0.0) for n, prompt in enumerate(prompts(3))]
    for request, got in zip(requests, await engine.generate(requests), strict=True):
        tokens = request.token_ids.tolist()
        with torch.no_grad():
            expected = log_probs_of(model, tokens, tokens_of(got), 1.0)[0].numpy()
            for token in tokens_of(got):
                assert token == int(logits_of(model, tokens)[-1].argmax())
                tokens.append(token)
        assert np.abs(expected - got.log_probs).max() < NATS
        assert {span.version for span in got.spans} == {version}


@pytest.mark.parametrize("name", sorted(DRIVERS))
def test_the_engine_responses_as_transformers_with_the_new_weights(name, attached, tiny, tmp_path):
    model = load_plain(tiny)
    rank = OneRank(DRIVERS[name], tmp_path, model, **COMPARED)

    async def scene(engine):
        for version in (1, 2):
            moved(model, seed=version)
            report = await update_weights(rank, engine, version)
            assert report.version == version
            assert report.buckets > 5
            assert await engine.version() == version
            await require_same_responses(engine, model, version)

    try:
        play(attached, tiny, tmp_path, scene)
    finally:
        rank.sender.close()


def test_requests_that_a_real_server_refuses(attached, tiny, tmp_path, monkeypatch, served):
    """A damaged bucket, by disk and as a delta; a wrong version; weights that are not the trainer's. It lives on."""
    model = load_plain(tiny)
    disk, delta = (OneRank(kind, tmp_path / kind.__name__, model, **COMPARED) for kind in (Disk, Delta))
    finish = folder.finish

    def damage(beside, manifest):
        path = finish(beside, manifest)
        file = path / manifest.buckets[2].file
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return path

    async def scene(engine):
        report = await update_weights(delta, engine, 1)
        whole = report.bytes_sent
        sent = {name: tensor.float().clone() for name, tensor in model.state_dict().items()}
        await require_same_responses(engine, model, 1)
        await engine.pause()
        for rank in (disk, delta):
            monkeypatch.setattr(folder, "finish", damage)
            with torch.no_grad():
                next(model.parameters())[0] += 1e-3
            with pytest.raises(EngineError, match=r"engine 0 .*bucket 2 of version 2 .*checksum"):
                await rank.push(engine, 2)
            monkeypatch.undo()
        with pytest.raises(EngineError, match="version 7 was loaded, but its servers report"):
            await engine.commit_weights(7)
        check = EqualityCheck(delta.sender.servers, await engine.endpoints(), 2)
        check.digests.add(
            flatten(list((sent | {"model.norm.weight": torch.full((32,), 0.5)}).items()), index=0, last=True)
        )
        with pytest.raises(EngineError, match=r"does not hold what the trainer sent: model\.norm\.weight\.$"):
            check.require_equal()
        # The server reports that its weights are no longer those that were sent: all are sent again.
        served.ask("/update_weights_from_disk", {"model_path": str(tiny), "flush_cache": False})
        report = await delta.push(engine, 2)
        assert report.bytes_sent >= whole
        with torch.no_grad():
            next(model.parameters())[3, 3] += 0.5
        report = await delta.push(engine, 3)
        assert report.bytes_sent < whole / 10
        await engine.resume()
        await require_same_responses(engine, model, 3)

    try:
        play(attached, tiny, tmp_path, scene)
    finally:
        disk.sender.close()
        delta.sender.close()
