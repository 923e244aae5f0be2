"""One server with two replicas of the model, by every transport. Its server takes a minute and a half to start, so this is run
by hand: pytest plugins/slime-vllm/tests/replicas.py"""

import asyncio
import re
import urllib.request

import pytest
import torch
from served import Served
from test_transports import (
    test_a_broken_folder_leaves_the_old_weights,
    test_after_a_broken_bucket_nothing_is_served_until_all_are_there,
)
from vllm_setup import LONG, PYTHON, asked, differences, endless, load, require_close, setup_for

from slime_core.types.completion import FinishReason
from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.tiny_model import load_plain, moved, named_weights
from slime_transports.plugin import Delta, Disk, Distributed, Ipc
from slime_vllm.plugin import Vllm

__all__ = [
    "test_a_broken_folder_leaves_the_old_weights",
    "test_after_a_broken_bucket_nothing_is_served_until_all_are_there",
]


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """In place of the session's."""
    folder = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), start_timeout=580, data_parallel_size=2))
    try:
        info = background.run(engine.start(setup_for(model, folder, max_batch=128, num_devices=2)))
        yield Served(info, [info.address], model, folder, engine, background)
    finally:
        background.run(engine.stop())
        background.close()


def generated_by_each(served):
    request = urllib.request.Request(served.address + "/metrics", headers={"Authorization": f"Bearer {served.token}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        counts = re.findall(
            r'^vllm:generation_tokens_total\{engine="\d+".*\} (\S+)$', response.read().decode(), re.MULTILINE
        )
    return [float(count) for count in counts]


async def require_responses_of_both(engine, served, plain, version):
    before = generated_by_each(served)
    requests = [asked(f"v{version}-{seed}", [5, 6, 7 + seed % 3], seed) for seed in range(12)]
    responses = await engine.generate(requests)
    for request, response in zip(requests, responses, strict=True):
        require_close(differences(plain, request, response))
        assert {span.version for span in response.spans} == {version}
    after = generated_by_each(served)
    assert len(after) == 2
    assert all(new > old for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("driver", [None, Disk, Delta, Ipc, Distributed])
async def test_new_weights_reach_both(driver, attached, served, model, tmp_path):
    plain = load_plain(model, torch.float32)
    rank = None if driver is None else OneRank(driver, tmp_path / "run", plain)
    async with attached() as engine:
        assert engine.ranks_of_server == 2
        for version in (1, 2):
            moved(plain, seed=version)
            if rank is None:
                await load(engine, named_weights(plain), version)
            else:
                await engine.pause()
                await rank.push(engine, version)
                await engine.resume()
            await require_responses_of_both(engine, served, plain.double(), version)
            plain.float()
    if rank is not None:
        await asyncio.to_thread(rank.sender.close)


async def test_an_abort_reaches_both(attached, model):
    async with attached() as engine:
        await load(engine, named_weights(load_plain(model, torch.float32)), 7)
        running = asyncio.create_task(engine.generate([endless(f"long{number}", number) for number in range(4)]))
        # Without a look at the counts: on two cores the front process waits for seconds behind both replicas.
        await asyncio.sleep(0)
        await engine.abort()
        responses = await running
    assert {response.finish_reason for response in responses} == {FinishReason.ABORT}
    assert all(len(response.token_ids) < 1500 for response in responses)


async def test_requests_wait_inside_both(attached, served, model):
    """`retract`: what they have is computed again with the new weights, in either replica."""
    async with attached(pause_mode="retract") as engine:
        plain = load_plain(model, torch.float32)
        await load(engine, named_weights(plain), 8)
        requests = [endless(f"k{number}", number) for number in range(4)]
        before = generated_by_each(served)
        running = asyncio.create_task(engine.generate(requests))
        while not all(new > old for old, new in zip(before, generated_by_each(served), strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        moved(plain, seed=1)
        await load(engine, named_weights(plain), 9)
        plain = plain.double()
        for request, response in zip(requests, await running, strict=True):
            assert (response.finish_reason, len(response.token_ids)) == (FinishReason.LENGTH, LONG)
            assert response.spans[-1].version == 9
            require_close(differences(plain, request, response)[response.spans[-1].start :])
        assert any([span.version for span in response.spans] == [8, 9] for response in running.result())
