"""One server over two ranks, by every transport, compared after each update. Its server takes a minute and a half to start, so
this is run by hand: pytest plugins/slime-vllm/tests/tensor_parallel.py

The vocabulary is so small that the second rank has none of it."""

import asyncio

import pytest
import torch
from served import Served
from vllm_setup import PYTHON, asked, differences, load, require_close, setup_for

from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.tiny_model import load_plain, moved, named_weights
from slime_transports.plugin import Delta, Disk, Distributed, Ipc
from slime_vllm.plugin import Vllm


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """In place of the session's."""
    folder = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), start_timeout=580))
    try:
        info = background.run(engine.start(setup_for(model, folder, max_batch=128, num_devices=2)))
        yield Served(info, [info.address], model, folder, engine, background)
    finally:
        background.run(engine.stop())
        background.close()


@pytest.mark.parametrize("driver", [None, Disk, Delta, Ipc, Distributed])
async def test_each_rank_takes_its_part_of_new_weights(driver, attached, model, tmp_path):
    plain = load_plain(model, torch.float32)
    rank = None if driver is None else OneRank(driver, tmp_path / "run", plain, check_weight_update_equal=True)
    async with attached() as engine:
        assert engine.ranks_of_server == 2
        for version in (1, 2):
            moved(plain, seed=version)
            if rank is None:
                await load(engine, named_weights(plain), version)
            else:
                await engine.pause()
                report = await rank.push(engine, version)
                await engine.resume()
                assert report.compared_with == "trainer"
            requests = [asked(f"v{version}-{seed}", [5, 6, 7 + seed % 3], seed) for seed in range(4)]
            for request, response in zip(requests, await engine.generate(requests), strict=True):
                require_close(differences(plain.double(), request, response))
            plain.float()
    if rank is not None:
        await asyncio.to_thread(rank.sender.close)
